"""Going on with an output: what is trusted, what is done again, what is discarded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchspec.config import RunConfig
from batchspec.engine import fake, fake_answers
from batchspec.engine.fake_answers import Answer
from batchspec.errors import BatchspecError, MismatchError, RowError, UsageError
from batchspec.io.journal import JOURNAL_FOLDER, JournalWriter, encode_row, read_journal
from batchspec.io.results import load_results
from batchspec.io.schema import ResultRow
from batchspec.io.store import LocalStore
from batchspec.io.writer import commit_part
from batchspec.pipeline.status import read_status
from batchspec.types import Request, RowFailure
from tests.pipeline.faults import environment_with
from tests.pipeline.jobs import WritePrompts, answers, fake_config, run_cli, with_parts
from tests.pipeline.threads import generate_in_threads


def attempts_of(output: Path) -> list[int]:
    return load_results(str(output), ["attempt"])["attempt"].to_pylist()


@pytest.fixture
def finished(write_prompts: WritePrompts, tmp_path: Path) -> RunConfig:
    """A finished job: 40 rows in parts of 16, 16 and 8 rows."""
    config = fake_config(write_prompts(40), tmp_path / "out")
    generate_in_threads(config)
    return config


def truncate(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-100])


def flip_a_byte(part: Path) -> None:
    """Damage a data page: the footer still reads well."""
    data = bytearray(part.read_bytes())
    columns = pq.read_metadata(part).row_group(0)
    longest = max((columns.column(i) for i in range(columns.num_columns)), key=lambda c: c.total_compressed_size)
    data[longest.data_page_offset + longest.total_compressed_size - 20] ^= 0xFF
    part.write_bytes(data)


def swap_with_another_shard(part: Path) -> None:
    shutil.copy(part.with_name("part-00000.parquet"), part)


def replace_by_another_job(part: Path) -> None:
    table = pq.read_table(part)
    pq.write_table(table.replace_schema_metadata({}), part)


def empty(part: Path) -> None:
    part.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, swap_with_another_shard, replace_by_another_job, empty])
def test_r02_a_part_that_is_not_whole_is_not_taken_for_done(
    finished: RunConfig, tmp_path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    expected = answers(output)
    damage(output / "part-00001.parquet")
    generate_in_threads(finished)
    assert answers(output) == expected
    assert attempts_of(output) == [1] * 16 + [2] * 16 + [1] * 8
    assert "part-00001.parquet is damaged" in capsys.readouterr().err


def test_r03_a_kill_between_the_part_and_the_end_of_its_journal_doubles_nothing(
    finished: RunConfig, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    expected = answers(output)
    (output / "_SUCCESS").unlink()
    store = LocalStore(output)
    leftover = JournalWriter(store, 1, 1, "w0")
    leftover.append(encode_row(ResultRow(RowFailure(16, "stale", "left over"), 0, 1)))
    leftover.close()
    generate_in_threads(finished)
    assert answers(output) == expected
    assert attempts_of(output) == [1] * 40
    assert store.names(JOURNAL_FOLDER) == []


def test_rows_in_a_journal_are_not_decoded_again_and_a_torn_end_is_passed_over(
    finished: RunConfig, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    expected = answers(output)
    (output / "_SUCCESS").unlink()
    (output / "part-00002.parquet").unlink()
    store = LocalStore(output)
    journal = JournalWriter(store, 2, 1, "w0")
    for row_index in (32, 34, 35):
        journal.append(encode_row(ResultRow(RowFailure(row_index, "kept", "from the journal"), 0, 1)))
    journal.close()
    path = next((output / JOURNAL_FOLDER).iterdir())
    path.write_bytes(path.read_bytes()[:-7])
    assert set(read_journal(store, 2).records) == {32, 34}
    status = read_status(str(output))
    assert (status.state, status.rows_done, status.parts, status.remaining_seconds) == ("stopped", 34, 2, None)
    generate_in_threads(finished)
    rows = answers(output)
    assert [row["row_index"] for row in rows if row["error_type"] == "kept"] == [32, 34]
    assert [row for row in rows if row["error_type"] is None] == [
        row for row in expected if row["row_index"] not in (32, 34)
    ]


def test_a_shard_whose_journal_is_complete_is_committed_without_decoding(finished: RunConfig, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "_SUCCESS").unlink()
    (output / "part-00002.parquet").unlink()
    journal = JournalWriter(LocalStore(output), 2, 1, "w0")
    for row_index in range(32, 40):
        journal.append(encode_row(ResultRow(RowFailure(row_index, "kept", "from the journal"), 0, 1)))
    journal.close()
    generate_in_threads(finished)
    assert [row["error_type"] for row in answers(output)[32:]] == ["kept"] * 8


def test_a_worker_that_was_taken_for_dead_cannot_overwrite_a_part(finished: RunConfig, tmp_path: Path) -> None:
    part = tmp_path / "out" / "part-00001.parquet"
    before = part.read_bytes()
    table = pq.read_table(part)
    assert not commit_part(LocalStore(tmp_path / "out"), 1, table.schema, [table], {"run_id": "late"})
    assert part.read_bytes() == before
    assert list((tmp_path / "out" / "_batchspec" / "tmp").iterdir()) == []


def test_r08_overwrite_discards_what_is_ours_and_nothing_else(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    generate_in_threads(fake_config(write_prompts(100), output, shard_rows=10))
    (output / "notes.txt").write_text("mine")
    (output / "part-of-my-own.parquet").write_text("mine too")
    config = with_parts(fake_config(write_prompts(30), output, workers=4), output={"overwrite": True})
    summary = generate_in_threads(config)
    assert summary.rows.job.rows == 30
    assert [row["row_index"] for row in answers(output)] == list(range(30))
    assert (output / "notes.txt").read_text() == "mine"
    assert (output / "part-of-my-own.parquet").read_text() == "mine too"
    assert summary.as_json()["attempts"] == 1


def test_r08_overwrite_of_a_directory_that_is_not_ours_is_refused(write_prompts: WritePrompts, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "part-00000.parquet").write_text("of somebody else")
    with pytest.raises(UsageError, match="directory of its own"):
        generate_in_threads(with_parts(fake_config(write_prompts(3), output), output={"overwrite": True}))
    assert (output / "part-00000.parquet").read_text() == "of somebody else"


def test_r08_a_part_that_does_not_belong_fails_the_last_check(finished: RunConfig, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "_SUCCESS").unlink()
    shutil.copy(output / "part-00002.parquet", output / "part-00007.parquet")
    with pytest.raises(BatchspecError, match="part-00007"):
        generate_in_threads(finished)
    assert not (output / "_SUCCESS").exists()


def test_error_rows_are_decoded_again_on_request_and_good_rows_stay(
    write_prompts: WritePrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config(write_prompts(40), tmp_path / "out")

    def fail(request: Request) -> Answer:
        if request.row_index in (3, 4, 20):
            raise RowError("flaky", "try again")
        return fake_answers.answer(request)

    with monkeypatch.context() as patched:
        patched.setattr(fake, "answer", fail)
        generate_in_threads(config)
    output = tmp_path / "out"
    assert [row["row_index"] for row in answers(output) if row["error_type"]] == [3, 4, 20]
    summary = generate_in_threads(config)
    assert (summary.rows.job.error_rows, len(summary.attempts)) == (3, 1)

    summary = generate_in_threads(with_parts(config, run={"retry_errors": True}))
    generate_in_threads(fake_config(Path(config.input.inputs[0]), tmp_path / "plain"))
    assert answers(output) == answers(tmp_path / "plain")
    assert [row for row, attempt in enumerate(attempts_of(output)) if attempt == 2] == [3, 4, 20]
    assert (summary.rows.job.error_rows, len(summary.attempts)) == (0, 2)
    assert list((output / "_batchspec" / "retry").iterdir()) == []
    assert abs(summary.as_json()["unattributed_share"]) < 0.02


DISK_FULL = """
import errno, types, batchspec.io.store as store
store.os = types.SimpleNamespace(**vars(os))
calls = []
def full(*arguments, **options):
    calls.append(1)
    if len(calls) > {good_calls}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return os.{call}(*arguments, **options)
store.os.{call} = full
"""


@pytest.mark.parametrize(("call", "good_calls"), [("write", 10), ("fsync", 0), ("fsync", 2), ("link", 0)])
def test_r12_a_full_disk_is_exit_1_leaves_no_damaged_part_and_the_job_goes_on_later(
    write_prompts: WritePrompts, tmp_path: Path, call: str, good_calls: int
) -> None:
    path, output = write_prompts(40), tmp_path / "out"
    code = DISK_FULL.format(call=call, good_calls=good_calls)
    if call == "link":
        code += "store.os.rename = full\n"
    faults = environment_with(tmp_path / "faults", code)
    done = run_cli("generate", path, "-o", output, "--engine", "fake", **faults)
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert str(output) in done.stderr
    assert "Traceback" not in done.stderr
    assert all(pq.read_table(part).num_rows == 16 for part in output.glob("part-*"))
    assert list((output / "_batchspec" / "tmp").iterdir()) == []
    generate_in_threads(with_parts(fake_config(path, output), engine={"max_batch": 32}))
    generate_in_threads(fake_config(path, tmp_path / "plain"))
    assert answers(output) == answers(tmp_path / "plain")


def test_an_output_that_cannot_be_written_is_exit_1(write_prompts: WritePrompts, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in ("/proc/no/such", tmp_path / "file" / "below"):
        done = run_cli("generate", write_prompts(3), "-o", output, "--engine", "fake")
        assert done.returncode == 1, done.stderr
        assert str(output) in done.stderr
        assert "Traceback" not in done.stderr


def test_a_damaged_manifest_is_exit_2_and_says_what_to_do(finished: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "out" / "_batchspec" / "manifest.json").write_text("{")
    with pytest.raises(MismatchError, match="--overwrite"):
        generate_in_threads(finished)
    assert generate_in_threads(with_parts(finished, output={"overwrite": True})).rows.job.rows == 40
