"""Imports go one way, heavy libraries stay in their place, files stay short: checked on the syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 300

# A module may import from lower levels, and from its own package on its own level. The longest prefix counts.
LEVELS = [
    {"errors"},
    {"stats", "text", "system"},
    {"types"},
    {"config"},
    {"workload", "ngrams", "io.schema", "accounting.cost"},
    {"io", "engine", "profile"},
    {"profile.measure", "profile.step_cost", "profile.trials", "accounting", "report", "audit"},
    {"pipeline"},
    {"cli"},
    {"__main__"},
]
FORBIDDEN = [("engine", "io"), ("engine", "pipeline")]
HOMES = {
    "torch": ("engine",),
    "transformers": ("engine",),
    "vllm": ("engine",),
    "pandas": ("report", "accounting.summary"),
    "click": ("cli", "pipeline"),
    "tqdm": ("cli", "pipeline"),
}

MODULES = {
    ".".join(path.relative_to(ROOT / "batchspec").with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "batchspec").rglob("*.py"))
}
SHORT_FILES = sorted(path for folder in ("batchspec", "pipelines", "data") for path in (ROOT / folder).rglob("*.py"))


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def level_of(module: str) -> int:
    """The level of the longest listed prefix. Raises KeyError for a module that has no place yet."""
    places = {
        prefix: level for level, prefixes in enumerate(LEVELS) for prefix in prefixes if is_within(module, prefix)
    }
    if not places:
        raise KeyError(f"batchspec.{module} has no place in the import order: add it to LEVELS")
    return places[max(places, key=len)]


def imported_names(source: str) -> set[str]:
    """Every dotted name that the source imports, at any depth, `from x import y` giving `x` and `x.y`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def faults(module: str, source: str) -> list[str]:
    """What `module` (its name within batchspec) imports and must not, one line each."""
    names = imported_names(source)
    found = [
        f"{library} belongs in {' and '.join(homes)}"
        for library, homes in HOMES.items()
        if any(is_within(name, library) for name in names) and not any(is_within(module, home) for home in homes)
    ]
    for name in sorted(names & {f"batchspec.{known}" for known in MODULES}):
        target = name.removeprefix("batchspec.")
        same_package = target.split(".")[0] == module.split(".")[0]
        if any(is_within(module, here) and is_within(target, there) for here, there in FORBIDDEN):
            found.append(f"must not import {target}")
        elif level_of(target) > level_of(module) or (level_of(target) == level_of(module) and not same_package):
            found.append(f"imports {target}, which is not below it")
    return found


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__"])
def test_imports_go_one_way_and_libraries_stay_in_their_place(module: str) -> None:
    assert faults(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize("path", SHORT_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_at_most_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("types", "from batchspec.stats import DecodeStats", []),
        ("stats", "from batchspec.types import Route", ["imports types, which is not below it"]),
        ("stats", "def f():\n    import batchspec.types", ["imports types, which is not below it"]),
        ("config", "from batchspec import workload", ["imports workload, which is not below it"]),
        ("io.reader", "from batchspec.io.schema import result_schema", []),
        ("engine.fake", "from batchspec.io import schema", ["must not import io", "must not import io.schema"]),
        ("io.reader", "import torch.nn as nn", ["torch belongs in engine"]),
        ("engine.fake", "import torch\nfrom transformers import AutoConfig", []),
        ("accounting.cost", "import pandas", ["pandas belongs in report and accounting.summary"]),
        ("audit", "from tqdm import tqdm", ["tqdm belongs in cli and pipeline"]),
        ("pipeline.runner", "from tqdm import tqdm\nfrom batchspec.engine.fake import FakeEngine", []),
    ],
)
def test_the_check_itself(module: str, source: str, expected: list[str]) -> None:
    assert faults(module, source) == expected


def test_a_module_without_a_place_is_named() -> None:
    with pytest.raises(KeyError, match=r"batchspec\.surprise has no place"):
        level_of("surprise")
