"""The sample data is what its README says, and the script beside it makes it again."""

import csv
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchspec.config import DEMO_MAX_ROWS, InputConfig, RouteConfig
from batchspec.io.parser import RowParser
from batchspec.profile.policy import static_policy
from batchspec.types import Method, RowFailure, SamplingParams

DATA = Path(__file__).parent.parent / "data"
PROMPTS = DATA / "sample_prompts.parquet"
CLASSES = {"extraction", "rewriting", "code_edit", "passage_qa", "short_facts", "open_writing"}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return pq.read_table(PROMPTS).to_pylist()


def is_bad(row: dict[str, Any]) -> bool:
    return str(row["request_id"]).startswith("bad-")


def test_the_script_makes_the_same_table_again() -> None:
    make_table = runpy.run_path(str(DATA / "make_sample_prompts.py"))["make_table"]
    assert make_table().equals(pq.read_table(PROMPTS))
    assert not make_table(seed=1).equals(make_table(seed=2))


def test_rows_and_classes(rows: list[dict[str, Any]]) -> None:
    good = [row for row in rows if not is_bad(row)]
    assert (len(good), len(rows) - len(good)) == (252, 8)
    assert len(rows) <= DEMO_MAX_ROWS
    assert Counter(row["request_class"] for row in good) == dict.fromkeys(CLASSES, 42)
    assert len({row["request_id"] for row in rows}) == len(rows)
    assert all((row["prompt"] is None) != (row["messages"] is None) for row in good)
    assert sum(row["prompt"] is not None for row in good) == 30


def test_no_prompt_stands_twice(rows: list[dict[str, Any]]) -> None:
    good = [str(row["prompt"] or row["messages"]) for row in rows if not is_bad(row)]
    assert len(set(good)) == len(good)


def test_r01_the_bad_rows_and_no_others_become_row_errors() -> None:
    """All but the over-long prompt: how many tokens a prompt has only the model's tokenizer can say."""
    table = pq.read_table(PROMPTS).combine_chunks()
    parser = RowParser(InputConfig(inputs=(str(PROMPTS),)), SamplingParams())
    parsed = [row for batch in table.to_batches() for row in parser.parse(batch, 0)]
    request_ids = table.column("request_id").to_pylist()
    failed = {name for name, row in zip(request_ids, parsed, strict=True) if isinstance(row, RowFailure)}
    assert failed == {f"bad-{number}" for number in range(1, 8)}


def test_lengths_in_the_demo_models_tokens(rows: list[dict[str, Any]], demo_model_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path)

    def num_tokens(row: dict[str, Any]) -> int:
        if row["prompt"] is not None:
            return len(tokenizer(row["prompt"])["input_ids"])
        chat = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=True)
        return len(chat["input_ids"])

    lengths = [num_tokens(row) for row in rows if not is_bad(row)]
    assert (min(lengths), max(lengths)) == (11, 1471)
    assert 40_000 < sum(lengths) < 50_000
    too_long = next(row for row in rows if row["request_id"] == "bad-8")
    assert num_tokens(too_long) == 10_675


def test_the_routes_use_both_methods_and_known_classes() -> None:
    policy = static_policy(RouteConfig(routes_file=str(DATA / "demo_routes.toml")))
    assert set(policy.by_class) - {"*"} <= CLASSES
    methods = {name: policy.route(name, 32).method for name in CLASSES}
    lookup = {name for name, method in methods.items() if method is Method.PROMPT_LOOKUP}
    assert lookup == {"extraction", "rewriting", "code_edit", "passage_qa"}
    assert {methods[name] for name in CLASSES - lookup} == {Method.TARGET_ONLY}


def test_the_price_sheet_has_prices_and_says_that_they_are_examples() -> None:
    with (DATA / "device_prices.csv").open(newline="") as file:
        prices = list(csv.DictReader(file))
    assert all(float(price["usd_per_hour"]) > 0 and price["source"].startswith("example") for price in prices)
    assert len({price["device"] for price in prices}) == len(prices) == 5
