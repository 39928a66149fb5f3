import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.workload import RequestClassifier


@pytest.mark.parametrize(
    ("request_class", "num_prompt_tokens", "max_new_tokens", "cell"),
    [
        ("summarization", 300, 512, "summarization/p256-1024/o256-1024"),
        ("summarization", 255, 1024, "summarization/p64-256/o1024-4096"),
        (None, 1, 1, "default/p1-4/o1-4"),
        ("", 0, 4, "default/p0-4/o4-16"),
        ("a/b", 100_000, 16, "a/b/p65536-262144/o16-64"),
    ],
)
def test_cells(request_class: str | None, num_prompt_tokens: int, max_new_tokens: int, cell: str) -> None:
    assert RequestClassifier().classify(request_class, num_prompt_tokens, max_new_tokens).cell == cell


def test_the_label_is_the_rows_own_or_default() -> None:
    classifier = RequestClassifier()
    assert [classifier.label(label) for label in ("qa", "", None)] == ["qa", "default", "default"]
    assert classifier.classify("qa", 5, 5).label == "qa"


@given(num_tokens=st.integers(1, 10**7))
def test_a_bucket_holds_its_number_and_spans_a_factor_of_four(num_tokens: int) -> None:
    bucket = RequestClassifier().classify("x", num_tokens, 1).prompt_bucket
    low, high = map(int, bucket.split("-"))
    assert low <= num_tokens < high == 4 * low
