"""What the parent process and a scheduler import stays light: checked in fresh interpreters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL_LIBRARIES = {"torch", "transformers", "vllm", "accelerate", "gguf", "ray"}
# What `--help` must not wait for either.
DATA_LIBRARIES = {"pyarrow", "pandas", "datasets", "pydantic", "numpy"}

HELP = "from batchspec.cli import main\nassert main({}) == 0"
LIGHT_ENGINE_MODULES = ["batchspec.engine", "batchspec.engine.fake", "batchspec.engine.demo_model"]


def loaded_by(code: str) -> set[str]:
    """Top-level names of the modules that running `code` in a fresh interpreter loads."""
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_outside_the_engine() -> list[str]:
    paths = sorted((ROOT / "batchspec").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.startswith(("batchspec.engine", "batchspec.__main__"))]


def test_nothing_but_the_engine_loads_a_model_library() -> None:
    names = modules_outside_the_engine() + LIGHT_ENGINE_MODULES
    assert {"batchspec.config", "batchspec.io.reader", "batchspec.profile.policy", "batchspec.cli"} <= set(names)
    assert loaded_by("\n".join(f"import {name}" for name in names)) & MODEL_LIBRARIES == set()


@pytest.mark.parametrize(
    "code",
    [
        "import batchspec",
        "import batchspec.config, batchspec.types, batchspec.stats, batchspec.errors",
        "import batchspec.engine.demo_model",
        HELP.format("['--help']"),
        HELP.format("['generate', '--help']"),
    ],
    ids=["package", "records", "demo model", "help", "generate help"],
)
def test_light_imports_stay_light(code: str) -> None:
    assert loaded_by(code) & (MODEL_LIBRARIES | DATA_LIBRARIES) == set()
