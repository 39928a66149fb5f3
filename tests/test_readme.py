"""The README says what the program does: its tables, options and paths are checked against the code."""

import re
from collections.abc import Iterator
from pathlib import Path

import click

from batchspec import errors
from batchspec.cli import cli
from batchspec.io.schema import RESULT_COLUMNS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_column_table_is_the_schemas() -> None:
    lines = [f"| `{column.name}` | {column.unit} | {column.description} |" for column in RESULT_COLUMNS]
    table = "\n".join(["| column | unit | meaning |", "|---|---|---|", *lines])
    written = re.search(r"<!-- columns: begin .*? -->\n(.*?)\n?<!-- columns: end -->", README, re.DOTALL)
    assert written is not None
    assert written[1] == table


def commands_of(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield from commands_of(command) if isinstance(command, click.Group) else (command,)


def test_every_option_it_names_exists() -> None:
    assert isinstance(cli, click.Group)
    known = {name for command in commands_of(cli) for option in command.params for name in option.opts}
    assert set(re.findall(r"(?<!\w)--[a-z][a-z-]+", README)) <= known | {"--help"}


def test_every_path_it_names_exists() -> None:
    named = set(re.findall(r"`((?:batchspec|tests|data|\.ci)/[\w./]*)`|\]\(([\w./]+)\)", README))
    paths = {left or right for left, right in named}
    assert len(paths) > 10
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_c01_every_exit_code_of_its_table_is_an_errors() -> None:
    table = README.split("| exit | meaning |")[1].split("\n\n")[0]
    written = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    raised = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.BatchspecError)
    }
    assert written <= raised | {0}
    assert 99 not in raised
