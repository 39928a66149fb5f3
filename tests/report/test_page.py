"""The page: one file, every figure, the report's own numbers, the answer before anything else."""

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchspec.cli import main
from batchspec.errors import MissingDependencyError
from batchspec.pipeline.report import report_numbers, write_html
from batchspec.report.page import render
from tests.report.jobs import write_job
from tests.report.test_numbers import AUDIT, PROFILE, SAVING

FIGURES = [
    "Saving by speculation",
    "Cost by class and method, USD per million output tokens",
    "Metered time by line",
    "Drift against the profile",
    "Acceptance by position",
    "First rejection",
    "Throughput and occupancy over the job",
    "Waiting times",
    "Error rows by kind",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with everything that a page can show."""
    output = write_job(tmp_path_factory.mktemp("jobs") / "job", saving=SAVING, profile=PROFILE)
    (output / "_batchspec/audit.json").write_text(json.dumps(AUDIT))
    return output


@pytest.fixture(scope="module")
def page(job: Path) -> str:
    return render(report_numbers([str(job)]))


@pytest.fixture(scope="module")
def two(job: Path) -> str:
    """The page of two runs, the second twice as fast."""
    fast = write_job(job.parent / "fast", speed=2.0)
    return render(report_numbers([str(job), str(fast)]))


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<(style|svg).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL))


def test_a_page_shows_every_figure_and_the_answer_first(page: str) -> None:
    assert re.findall(r'role="img" aria-label="([^"]*?)\. ', page) == FIGURES
    assert page.count("<svg") == len(FIGURES)
    assert text_of(page.split("<body>")[1]).strip().startswith("job · run r1 · 2026-01-02T03:04:05+00:00 · m bfloat16")
    assert page.index("Speculation saved 18.0%") < page.index("<figure") < page.index("<table")


def test_a_page_asks_nothing_of_the_network(two: str) -> None:
    assert not re.search(r"<script|<link(?! rel=\"icon\")|<img|<iframe|@import|url\((?!#)", two)
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", two)


def test_page_and_json_have_the_same_numbers(job: Path, page: str) -> None:
    text = text_of(page)
    # by hand: 7 s and 9 s of 30 at 0.001 USD/s, over 11 and 9 tokens
    assert "copy prompt_lookup 2 11 636.364 23.3% 62.5% 1.83" in text
    assert "chat target_only 2 9 1,000.000 30.0% - 1.00" in text
    assert [g["usd_per_million_output_tokens"] for g in report_numbers([str(job)])["runs"][0]["groups"]][
        -1
    ] == pytest.approx(7000 / 11)


def test_two_runs_are_compared_with_the_change_in_money_first(two: str) -> None:
    text = text_of(two.split("<body>")[1]).strip()
    assert text.startswith("2 runs side by side fast costs 50.0% less than job: 750.000 instead of 1,500.000 USD")
    assert "most of it in load (-250.000)" in text
    assert "load 500.000 250.000 -250.000" in text


def test_labels_from_the_input_cannot_break_the_page(job: Path) -> None:
    numbers = report_numbers([str(job)])
    evil = "<script>alert(1)</script>$\\frac$"
    for group in numbers["runs"][0]["groups"]:
        group["request_class"] = evil
    page = render(numbers)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_an_unpriced_job_has_a_page_without_money(tmp_path: Path) -> None:
    unpriced = render(report_numbers([str(write_job(tmp_path / "job", price=None))]))
    assert "device seconds per 1,000 output tokens" in unpriced
    assert "USD in all" not in unpriced


def test_the_command_writes_the_page(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(job), "--html", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", str(job), "--html", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot write --html" in capsys.readouterr().err


def test_a_missing_extra_is_named_with_the_line_that_mends_it(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without_jinja2(name: str, *rest: Any) -> Any:
        if name == "jinja2":
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_jinja2)
    with pytest.raises(MissingDependencyError, match=r"--html needs jinja2: pip install 'batchspec\[report\]'"):
        write_html(report_numbers([str(job)]), str(tmp_path / "page.html"))
