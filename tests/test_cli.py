"""The command line: options, precedence, exit codes, and what goes to which stream."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from batchspec import errors
from batchspec.cli import cli, main
from batchspec.config import RunConfig
from batchspec.io.results import load_results
from batchspec.pipeline.options import HELP, option_fields, option_names, run_config, run_options
from tests.pipeline.jobs import WritePrompts, run_cli, summary_of
from tests.pipeline.threads import workers_as_threads

pytest_plugins = ["tests.pipeline.conftest"]


@pytest.fixture(autouse=True)
def workers_are_threads() -> Iterator[None]:
    """In this process; commands that a test runs have processes."""
    with workers_as_threads():
        yield


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*arguments: str) -> RunConfig:
    """The configuration that these arguments of `generate` make."""
    found: list[RunConfig] = []

    @click.command()
    @click.argument("inputs", nargs=-1)
    @run_options
    @click.pass_context
    def command(context: click.Context, /, inputs: tuple[str, ...], **options: object) -> None:
        found.append(run_config(context, inputs))

    command.main(list(arguments), standalone_mode=False)
    return found[0]


def test_the_defaults_are_those_of_the_configuration() -> None:
    assert parsed("in.parquet") == RunConfig(input=RunConfig().input.__class__(inputs=("in.parquet",)))


def test_every_option_is_explained_and_no_name_is_used_twice() -> None:
    names = [field.name for _, field, _ in option_fields()]
    assert sorted(names) == sorted(HELP)
    flags = [flag for name in names for flag in option_names(name)]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize(
    "flag",
    [
        "--output",
        "-o",
        "--model",
        "--draft-model",
        "--dtype",
        "--engine",
        "--executor",
        "--workers",
        "--devices",
        "--max-batch",
        "--method",
        "--num-speculative-tokens",
        "--routes",
        "--max-new-tokens",
        "--temperature",
        "--top-p",
        "--top-k",
        "--seed",
        "--acceptance-rule",
        "--price-per-hour",
        "--max-error-rate",
        "--limit",
        "--overwrite",
        "--summary-file",
        "--prompt-column",
        "--kv-memory",
        "--config",
    ],
)
def test_names_that_scripts_rely_on_exist(flag: str) -> None:
    assert f"{flag}" in CliRunner().invoke(cli, ["generate", "--help"]).output.replace(",", " ").split()


def test_an_option_wins_over_the_file_which_wins_over_the_default(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'max-batch = 4\nseed = 7\nmethod = "prompt-lookup"\ndevices = ["cpu"]\noverwrite = true\n'
    )
    config = parsed("x", "--config", str(tmp_path / "c.toml"), "--seed", "9", "--kv-memory", "2GiB")
    assert (config.engine.max_batch, config.sampling.seed, config.run.workers) == (4, 9, 1)
    assert (config.routes.method, config.run.devices, config.output.overwrite) == ("prompt_lookup", ("cpu",), True)
    assert config.engine.kv_memory_bytes == 2 * 2**30


def test_a_row_wins_over_an_option_and_null_inherits_it(write_prompts: WritePrompts, tmp_path: Path) -> None:
    path = write_prompts(3, max_new_tokens=[1, None, 2])
    assert main(["generate", str(path), "--engine", "fake", "--max-new-tokens", "4", "--seed", "3"]) == 0
    rows = load_results(str(tmp_path / "in.generated"), ["output_tokens"]).to_pylist()
    assert [rows[0]["output_tokens"], rows[2]["output_tokens"]] == [1, 2]
    assert 2 < rows[1]["output_tokens"] <= 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stop", r"a\nb"], ("a\nb",)),
        (["--stop", "a\nb"], ("a\nb",)),
        (["--stop", r"a\\nb"], (r"a\nb",)),
        (["--stop", r"\t", "--stop", r"\d"], ("\t", r"\d")),
        (["--config", "c.toml"], ("\n", r"a\nb")),
    ],
)
def test_c06_stop_strings_from_the_command_line_know_escapes_and_those_of_a_file_are_as_they_are(
    in_tmp: Path, arguments: list[str], expected: tuple[str, ...]
) -> None:
    (in_tmp / "c.toml").write_text('stop = ["\\n", "a\\\\nb"]\n')
    assert parsed("x", *arguments).sampling.stop == expected


def test_c07_the_dtype_is_an_option_and_on_record(write_prompts: WritePrompts, tmp_path: Path) -> None:
    path = write_prompts(2)
    assert main(["generate", str(path), "--engine", "fake", "--dtype", "float32"]) == 0
    manifest = json.loads((tmp_path / "in.generated/_batchspec/manifest.json").read_text())
    assert manifest["identity"]["dtype"] == "float32"
    assert main(["generate", str(path), "--engine", "fake", "--dtype", "bfloat16"]) == 2


BAD_FILE = "max-bach = 3\nworkers = [1]\nseed = 2.5\nstop = [3]\noverwrite = 1\ntop-p = 'x'\n"
BAD_VALUES = [
    "workers must be a whole number, got [1]",
    "seed must be a whole number, got 2.5",
    "stop must be a text or a list of texts, got [3]",
    "overwrite must be true or false, got 1",
    "top-p must be a number, got 'x'",
]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-speculative-tokens", "-1"], ["--num-speculative-tokens", "0 to 16", "-1"]),
        (["--num-speculative-tokens", "10000"], ["--num-speculative-tokens", "0 to 16", "10000"]),
        (["--method", "draft-model"], ["draft-model", "--draft-model"]),
        (["--method", "magic"], ["--method", "magic", "prompt-lookup"]),
        (["--stop", ""], ["stop strings must not be empty"]),
        (["--max-new-tokens", "0"], ["max_new_tokens must be at least 1, got 0"]),
        (["--temperature", "-1", "--workers", "0"], ["temperature", "--workers must be at least 1, got 0"]),
        (["--max-error-rate", "3"], ["--max-error-rate must be between 0 and 1, got 3"]),
        (["--engine", "warp"], ["--engine must be one of", "'warp'"]),
        (["--devices", "gpu"], ["--devices gpu", "cuda:0"]),
        (["--kv-memory", "lots"], ["--kv-memory", "4GiB"]),
        (["--routes", "no.toml"], ["--routes no.toml"]),
        (["--config", "no.toml"], ["no.toml"]),
        (["--config", "bad.toml"], ["max-bach", "max-batch", *BAD_VALUES]),
        (["-o", "a.txt"], ["a.txt is a file"]),
        (["-o", "foreign"], ["foreign", "directory of its own"]),
        (["--prompt-column", "body"], ["body"]),
    ],
    ids=lambda value: "_".join(value)[:40],
)
def test_c09_a_wrong_option_is_exit_2_and_a_message_that_names_option_and_limits(
    in_tmp: Path,
    write_prompts: WritePrompts,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    write_prompts(1)
    (in_tmp / "bad.toml").write_text(BAD_FILE)
    (in_tmp / "a.txt").touch()
    (in_tmp / "foreign").mkdir()
    (in_tmp / "foreign" / "data.parquet").touch()
    assert main(["generate", "in.parquet", "--engine", "fake", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [word for word in words if word not in printed.err] == []
    assert "Traceback" not in printed.err
    assert not (in_tmp / "in.generated").exists()


def test_c09_zero_speculative_tokens_mean_target_only(
    write_prompts: WritePrompts, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--engine", "fake", "--method", "prompt-lookup", "--num-speculative-tokens", "0"]
    assert main(["generate", str(write_prompts(3)), *arguments]) == 0
    assert list(json.loads(capfd.readouterr().out)["methods"]) == ["target_only"]


def test_c01_every_outcome_has_its_exit_code_and_a_summary_where_the_job_ended(
    write_prompts: WritePrompts, tmp_path: Path
) -> None:
    good, some, bad = (
        write_prompts(4),
        write_prompts(["a", None, "b", "c"], "some.parquet"),
        write_prompts([None] * 3, "bad.parquet"),
    )
    summary_file = tmp_path / "summary.json"
    fake = ("--engine", "fake")
    done = run_cli("generate", good, *fake, "--summary-file", summary_file)
    assert done.returncode == 0
    assert summary_of(done.stdout) == json.loads(summary_file.read_text())
    assert len(done.stdout.splitlines()) == 1

    within = run_cli("generate", some, *fake, "--max-error-rate", "0.25")
    assert within.returncode == 0
    for path in (some, bad):
        over = run_cli("generate", path, *fake)
        assert over.returncode == 3, over.stderr
        assert summary_of(over.stdout)["error_rows"] > 0
        assert "error_type" in over.stderr

    for arguments in (
        [],
        ["generate"],
        ["generate", "no.parquet", "-o", "x"],
        ["generate", str(good), "--model", "no/such/dir"],
    ):
        wrong = run_cli(*arguments, cwd=tmp_path, HF_HUB_OFFLINE="1")
        assert wrong.returncode == 2, wrong.stderr
        assert wrong.stdout == ""
        assert "Traceback" not in wrong.stderr


def test_p13_zero_rows_are_exit_0_and_nothing_but_bad_rows_exit_3(
    write_prompts: WritePrompts, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(write_prompts(0)), "--engine", "fake"]) == 0
    assert main(["generate", str(write_prompts([None], "b.parquet")), "--engine", "fake"]) == 3


def test_c02_no_outcome_is_exit_99_which_a_scheduler_takes_for_skipped() -> None:
    codes = {error.exit_code for error in _subclasses(errors.BatchspecError) if "exit_code" in vars(error)}
    assert codes <= {1, 2, 3, 4, 5, 6}
    assert {errors.Interrupted(number, "").exit_code for number in (2, 15)} == {130, 143}


def _subclasses(error: type[errors.BatchspecError]) -> list[type[errors.BatchspecError]]:
    return [error, *(deeper for direct in error.__subclasses__() for deeper in _subclasses(direct))]


def test_c04_paths_may_be_relative_to_a_directory_that_cannot_be_written(
    write_prompts: WritePrompts, tmp_path: Path
) -> None:
    write_prompts(2, "data/in.parquet")
    (tmp_path / "cwd").mkdir(mode=0o555)
    home = {"HOME": "", "XDG_CACHE_HOME": ""}
    done = run_cli("generate", "../data/in.parquet", "-o", "../out", "--engine", "fake", cwd=tmp_path / "cwd", **home)
    assert done.returncode == 0, done.stderr
    assert summary_of(done.stdout)["output"] == str(tmp_path / "out")
    assert f"output: {tmp_path / 'out'}" in done.stderr
    assert list((tmp_path / "cwd").iterdir()) == []


def test_without_output_the_answers_lie_beside_the_one_local_file(in_tmp: Path, write_prompts: WritePrompts) -> None:
    path = write_prompts(2, "d/my.rows.parquet")
    assert main(["generate", "d/my.rows.parquet", "--engine", "fake"]) == 0
    assert load_results(str(path.parent / "my.rows.generated")).num_rows == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["d"], "--output"),
        (["d/in.parquet", "d/in.parquet"], "--output"),
        (["d", "-o", "d/out"], "inside the input directory"),
    ],
)
def test_an_output_that_readers_of_the_input_would_pick_up_is_refused(
    in_tmp: Path, write_prompts: WritePrompts, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    write_prompts(1, "d/in.parquet")
    assert main(["generate", *arguments, "--engine", "fake"]) == 2
    assert words in capsys.readouterr().err


def test_the_demo_model_refuses_a_table(write_prompts: WritePrompts, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(write_prompts(1001))]) == 2
    printed = capsys.readouterr().err
    assert "1001 rows" in printed
    assert "--model" in printed


def test_a_prompt_is_never_printed(write_prompts: WritePrompts, tmp_path: Path) -> None:
    secret = "the-secret-word"
    path = write_prompts([f"tell {secret}", f"{secret} " * 9000], request_class=["a", "b"])
    done = run_cli("generate", path, "--engine", "fake", "--workers", "2")
    assert done.returncode == 3
    kept = [
        file.read_bytes()
        for file in (tmp_path / "in.generated").rglob("*")
        if file.suffix != ".parquet" and file.is_file()
    ]
    assert not any(secret.encode() in text for text in [done.stdout.encode(), done.stderr.encode(), *kept])


def test_status_tells_how_far_a_job_is(
    write_prompts: WritePrompts, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "in.generated")
    assert main(["status", output]) == 2
    assert main(["generate", str(write_prompts(20)), "--engine", "fake", "--price-per-hour", "1"]) == 0
    capfd.readouterr()
    assert main(["status", output, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["state"], found["rows"], found["rows_done"], found["parts"]) == ("finished", 20, 20, 2)
    assert found["cost_usd"] > 0
    assert main(["status", output]) == 0
    assert "finished" in capfd.readouterr().out


def test_version_and_help_are_exit_0(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert main(["generate", "--help"]) == 0
    project = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text())
    assert project["project"]["version"] in capfd.readouterr().out
