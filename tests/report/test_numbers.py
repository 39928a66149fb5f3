"""Every number of a report against a computation by hand, on a job of five rows."""

import json
from pathlib import Path
from typing import Any

import pytest

import batchspec
from batchspec.cli import main
from batchspec.errors import UsageError
from batchspec.pipeline.report import report_numbers
from tests.report.jobs import write_job

AUDIT = {"device_seconds": 0.0, "faults": 0, "tokens": 20, "near_ties": 1}
SAVING = {"share": 0.18, "low": 0.12, "high": 0.23, "saved_seconds": 6.6}
# what a profile says of `copy`: 8 of 10 first tokens held; the job has 3 of 4
PROFILE = {
    "acceptance": [
        {"request_class": "copy", "method": "prompt_lookup", "accepted_per_pos": [5, 2], "rejections_per_pos": [1, 3]},
        {"request_class": "copy", "method": "prompt_lookup", "accepted_per_pos": [3], "rejections_per_pos": [1]},
        {"request_class": "other", "method": "prompt_lookup", "accepted_per_pos": [], "rejections_per_pos": []},
    ]
}


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    numbers: dict[str, Any] = report_numbers([str(write_job(tmp_path / "job"))])["runs"][0]
    return numbers


def by(rows: list[dict[str, Any]], *keys: str) -> dict[Any, dict[str, Any]]:
    return {tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]]: row for row in rows}


def test_money_by_class_and_method(run: dict[str, Any]) -> None:
    groups = by(run["groups"], "request_class", "method")
    assert set(groups) == {("copy", "prompt_lookup"), ("chat", "target_only"), ("chat", "error")}
    copy, chat = groups["copy", "prompt_lookup"], groups["chat", "target_only"]
    # 7 s of 30 at 0.001 USD/s over 11 tokens; 9 s over 9 tokens
    assert copy["cost_usd"] == pytest.approx(0.007)
    assert copy["usd_per_million_output_tokens"] == pytest.approx(7000 / 11)
    assert chat["usd_per_million_output_tokens"] == pytest.approx(1000)
    assert copy["share"] == pytest.approx(7 / 30)
    assert copy["tokens_per_target_step"] == pytest.approx(11 / 6)
    assert copy["device_seconds_per_1000_output_tokens"] == pytest.approx(7000 / 11)
    assert (copy["prefill_seconds"], copy["draft_seconds"], copy["verify_seconds"]) == (2.0, 0.0, 4.0)


def test_components_add_up_to_the_metered_time_and_its_price(run: dict[str, Any]) -> None:
    parts = by(run["components"], "name")
    assert {name: part["device_seconds"] for name, part in parts.items()} == pytest.approx(
        {"rows: chat": 9.0, "rows: copy": 7.0, "load": 10.0, "idle": 4.0, "unattributed": 0.0}
    )
    assert sum(part["share"] for part in run["components"]) == pytest.approx(1)
    assert sum(part["cost_usd"] for part in run["components"]) == pytest.approx(0.030)
    per_million = sum(part["usd_per_million_output_tokens"] for part in run["components"])
    assert per_million == pytest.approx(run["summary"]["usd_per_million_output_tokens"]) == pytest.approx(1500)


def test_acceptance_by_position_and_first_rejections(run: dict[str, Any]) -> None:
    positions = by(run["acceptance"], "position")
    assert {p: (row["judged"], row["conditional_acceptance"]) for p, row in positions.items()} == {
        1: (4, pytest.approx(3 / 4)),
        2: (3, pytest.approx(2 / 3)),
    }
    rejected = {row["position"]: (row["drafts"], row["share"]) for row in run["first_rejection"]}
    assert rejected == {1: (1, 0.25), 2: (1, 0.25), None: (2, 0.5)}


def test_latency_is_of_answered_rows_by_method(run: dict[str, Any]) -> None:
    latency = by(run["latency"], "method")
    assert set(latency) == {"prompt_lookup", "target_only"}
    assert latency["target_only"]["first_token_seconds"] == pytest.approx({"p50": 3.5, "p95": 3.95, "p99": 3.99})
    assert latency["prompt_lookup"]["time_per_output_token_seconds"]["p50"] == pytest.approx((2 / 5 + 2 / 4) / 2)


def test_the_timeline_gives_rates_between_samples(run: dict[str, Any]) -> None:
    points = [(p["seconds"], p["live_rows"], p["output_tokens_per_second"]) for p in run["timeline"]]
    assert points == [(1.0, 2, 0.0), (3.0, 2, 5.5), (4.0, 0, 9.0)]


def test_drift_compares_the_first_position_with_the_profile(tmp_path: Path, run: dict[str, Any]) -> None:
    assert run["drift"] == []
    [row] = report_numbers([str(write_job(tmp_path / "routed", profile=PROFILE))])["runs"][0]["drift"]
    assert (row["request_class"], row["method"]) == ("copy", "prompt_lookup")
    assert (row["profile_acceptance"], row["measured_acceptance"]) == pytest.approx((0.8, 0.75))


@pytest.mark.parametrize(
    ("summary", "audit", "expected"),
    [
        ({}, None, ["1 of 2 classes speculate; what that saved was not measured", "1,500.000 USD per", "Not audited"]),
        (
            {"saving": SAVING},
            AUDIT,
            ["saved 18.0% (12.0% to 23.0%), net of measuring it; 1 of 2 classes", "800.000 of it", "no fault in 20"],
        ),
        (
            {"saving": {"share": -0.02, "low": -0.05, "high": 0.01, "saved_seconds": -0.6}},
            {**AUDIT, "faults": 3},
            ["Speculation lost 2.0% (-1.0% to 5.0%)", "5 rows, 1 of them errors, 20 tokens out", "AUDIT FAILED: 3"],
        ),
    ],
    ids=["not measured", "saved", "lost"],
)
def test_the_answer_comes_first(
    tmp_path: Path, summary: dict[str, Any], audit: dict[str, Any] | None, expected: list[str]
) -> None:
    output = write_job(tmp_path / "job", **summary)
    if audit is not None:
        (output / "_batchspec/audit.json").write_text(json.dumps(audit))
    run = report_numbers([str(output)])["runs"][0]
    assert [text in sentence for text, sentence in zip(expected, run["answer"], strict=True)] == [True] * 3, run[
        "answer"
    ]


def test_without_a_price_there_is_no_money(tmp_path: Path) -> None:
    run = report_numbers([str(write_job(tmp_path / "job", price=None))])["runs"][0]
    assert run["summary"]["cost_usd"] is None
    assert {part["cost_usd"] for part in run["components"]} == {None}
    assert "no price was given" in run["answer"][1]


def test_two_runs_side_by_side_say_what_changed_in_money(tmp_path: Path) -> None:
    slow, fast = write_job(tmp_path / "slow"), write_job(tmp_path / "fast", speed=2.0)
    comparison = report_numbers([str(slow), str(fast)])["comparison"]
    changes = {row["name"]: row["changes"][1] for row in comparison["components"]}
    assert comparison["total"]["values"] == pytest.approx([1500, 750])
    assert sum(changes.values()) == pytest.approx(comparison["total"]["changes"][1]) == pytest.approx(-750)
    assert changes["rows: copy"] == pytest.approx(-175)
    assert comparison["settings"] == []


def test_the_command_prints_at_most_100_columns_or_strict_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = str(write_job(tmp_path / "one", saving=SAVING, profile=PROFILE))
    two = str(write_job(tmp_path / "a-run-with-quite-a-long-name", speed=1.5))
    assert main(["report", one, two]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "Speculation saved 18.0%" in text
    assert "-0.050" in text, "the drift"
    assert main(["report", one, two, "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed == json.loads(json.dumps(report_numbers([one, two])))


def test_an_unfinished_or_foreign_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no manifest"):
        report_numbers([str(tmp_path)])
    output = write_job(tmp_path / "job")
    (output / "_SUCCESS").unlink()
    with pytest.raises(UsageError, match="has not finished"):
        report_numbers([str(output)])
    with pytest.raises(UsageError, match="has not finished"):
        batchspec.load_results(str(output))
    assert len(batchspec.load_results(str(output), allow_partial=True)) == 5


def test_load_results_gives_a_tidy_frame(tmp_path: Path) -> None:
    frame = batchspec.load_results(str(write_job(tmp_path / "job")))
    assert frame["row_index"].tolist() == [0, 1, 2, 3, 4]
    assert frame["output_tokens"].dtype == "Int32"
    assert frame["output_tokens"].sum() == 20
    assert frame.loc[4, ["error_type", "output_text"]].tolist()[0] == "empty_prompt"
    assert frame.attrs["summary"]["rows"] == 5
    costs = frame.groupby(["request_class", "method"])[["cost_usd", "output_tokens"]].sum()
    assert (costs["cost_usd"] / costs["output_tokens"] * 1e6).tolist() == pytest.approx([1000, 7000 / 11])


def test_datasets_loads_an_output_as_it_is(tmp_path: Path) -> None:
    from datasets import load_dataset

    output = write_job(tmp_path / "job")
    files = str(output / "part-*.parquet")
    loaded = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["row_index"][:] == [0, 1, 2, 3, 4]
    assert loaded.features["spec_decode_num_accepted_tokens_per_pos"].feature.dtype == "int32"
