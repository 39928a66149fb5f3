"""The kernels as narrower processors compile them: other vectors and tiles, the same answers and invariance."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.engine.cpu import build, kernels
from tests.engine import test_cpu_kernels as suite

# What the compiler may use on narrower x86 processors than this one, which runs it all the same.
LEVELS = {"AVX2": ["x86-64", "haswell"], "AVX512": ["x86-64", "haswell", "skylake-avx512"]}.get(
    torch.backends.cpu.get_cpu_capability(), []
)


def flags_of(level: str) -> list[str]:
    assert "-march=native" in build._FLAGS
    return [f"-march={level}" if flag == "-march=native" else flag for flag in build._FLAGS]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(build, "_FLAGS", flags_of(request.param))
    build.load.cache_clear()
    kernels._library.cache_clear()
    yield request.param
    build.load.cache_clear()
    kernels._library.cache_clear()


@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_linears(level: str, dtype: torch.dtype) -> None:
    suite.test_a_packed_linear_is_the_linear(33, 34, dtype)
    suite.test_a_packed_linear_is_the_linear(576, 1536, dtype)
    suite.test_a_linear_row_has_the_same_bits_at_every_number_of_rows(dtype, torch.get_num_threads())


@pytest.mark.parametrize("dtype", suite.DTYPES)
@pytest.mark.parametrize("shape", suite.SHAPES)
def test_attention(level: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    suite.test_attention_is_attention(suite.SETTINGS["plain"], shape, dtype)
    suite.test_attention_is_attention(suite.SETTINGS["all"], shape, dtype)


@pytest.mark.parametrize("dtype", suite.DTYPES)
def test_attention_rows_in_every_mix(level: str, dtype: torch.dtype) -> None:
    suite.test_attention_rows_have_the_same_bits_in_every_mix(suite.SETTINGS["all"], dtype, torch.get_num_threads())


@pytest.mark.parametrize("dtype", suite.DTYPES)
@pytest.mark.parametrize("case", suite.FUSED)
def test_layers(level: str, case: str, dtype: torch.dtype) -> None:
    suite.test_known_layers_are_fused_and_answer_as_before(case, dtype)


def test_argmax(level: str) -> None:
    suite.test_argmax_takes_the_lowest_of_equals(50257, torch.bfloat16, torch.get_num_threads())


@pytest.mark.parametrize("wider", ["skylake-avx512", "cooperlake"] if LEVELS else [])
def test_what_this_processor_may_not_run_compiles(wider: str, tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    source = Path(build.__file__).parent / "kernels.c"
    subprocess.run([*compiler, *flags_of(wider), "-o", str(tmp_path / "kernels.so"), str(source)], check=True)
