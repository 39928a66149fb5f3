"""The notebook runs from top to bottom and says what the report says."""

import json
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from batchspec.pipeline.report import report_numbers
from tests.report.jobs import write_job

NOTEBOOK = Path(__file__).parents[2] / "pipelines/cost_analysis.ipynb"
SHOW = """
import json
print(json.dumps({
    "trend": {date: values.dropna().to_dict() for date, values in trend.iterrows()},
    "total": total.to_dict(),
    "saved": saved.reset_index().to_dict("records"),
}))
"""


def run_notebook(parameters: dict[str, Any]) -> dict[str, Any]:
    """Execute the notebook with other parameters; its results."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    source = "".join(f"{name} = {value!r}\n" for name, value in parameters.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(source))
    notebook.cells.append(nbformat.v4.new_code_cell(SHOW))
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    result: dict[str, Any] = json.loads(notebook.cells[-1].outputs[0]["text"])
    return result


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("nights")
    slow = write_job(folder / "slow", saving={"share": 0.2, "low": 0.1, "high": 0.3, "saved_seconds": 7.5})
    fast = write_job(folder / "fast", speed=2.0)
    unpriced = write_job(folder / "unpriced", price=None)
    return {"2026-01-01": str(slow), "2026-01-02": str(fast), "2026-01-03": str(unpriced)}


@pytest.fixture(scope="module")
def results(jobs: dict[str, str]) -> dict[str, Any]:
    return run_notebook({"outputs": jobs, "invoice_usd": 1.0})


def test_the_trend_is_the_reports(jobs: dict[str, str], results: dict[str, Any]) -> None:
    trend, runs = results["trend"], report_numbers(list(jobs.values()))["runs"]
    assert list(trend) == list(jobs)
    for night, run in zip(trend.values(), runs[:2], strict=False):
        groups = {g["request_class"]: g["usd_per_million_output_tokens"] for g in run["groups"] if g["output_tokens"]}
        assert {name: night[name] for name in groups} == pytest.approx(groups)
        assert night["metered"] == pytest.approx(run["summary"]["usd_per_million_output_tokens"])
        assert night["all rows"] == pytest.approx(run["summary"]["active_usd_per_million_output_tokens"])
    # by hand: 7 s over 11 tokens at 0.001 USD/s; 0.10 USD per hour from the price sheet where the run had no price
    assert trend["2026-01-01"]["copy"] == pytest.approx(7000 / 11)
    assert trend["2026-01-03"]["copy"] == pytest.approx(7 * 0.10 / 3600 / 11 * 1e6)


def test_the_metered_time_is_reconciled_with_the_invoice(results: dict[str, Any]) -> None:
    total = results["total"]
    unpriced = 30 * 0.10 / 3600
    assert total["metered"] == pytest.approx(0.030 + 0.015 + unpriced)
    assert total["rows"] == pytest.approx(0.016 + 0.008 + unpriced * 16 / 30)
    assert total["outside the meter"] == pytest.approx(1 - total["metered"])


def test_the_saving_is_in_money_too(results: dict[str, Any]) -> None:
    assert results["saved"] == [
        {"date": "2026-01-01", "share": 0.2, "low": 0.1, "high": 0.3, "saved_usd": pytest.approx(0.030 * 0.25)}
    ]


def test_the_notebook_is_kept_without_outputs_and_its_defaults_are_the_demos() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert '"../demo-output"' in code[0].source
