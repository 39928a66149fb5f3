"""A token that noise brings about has a margin within the noise, whatever the filters; others have a larger one."""

import numpy as np
import pytest
import torch

from batchspec.engine.margins import support_margin, token_margin
from batchspec.engine.sampling import SampledRow, Sampler
from batchspec.types import SamplingParams

VOCAB = 300
SETTINGS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "flat": SamplingParams(temperature=5.0),
    "top-k": SamplingParams(temperature=0.8, top_k=5),
    "top-p": SamplingParams(temperature=1.2, top_p=0.7),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1),
    "all": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02),
}


def place(params: SamplingParams, index: int) -> SampledRow:
    return SampledRow(params, f"row:{index}", index, (), 0)


def chosen(logits: np.ndarray, row: SampledRow) -> int:
    return Sampler(frozenset()).choose(torch.tensor(logits)[None].clone(), [row])[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_noise_brings_about_is_within_the_noise(name: str) -> None:
    generator = np.random.default_rng(7)
    num_changed = 0
    for index in range(100):
        row = place(SETTINGS[name], index)
        logits = generator.normal(0, 3, VOCAB)
        per_logit = 0.3 * max(1.0, SETTINGS[name].temperature)
        other = chosen(logits + generator.uniform(-per_logit, per_logit, VOCAB), row)
        # a difference between two logits changes by twice what each of them does
        assert token_margin(logits, row, other, 2 * per_logit) <= 2 * per_logit + 1e-6
        num_changed += other != chosen(logits, row)
    assert num_changed > 1


@pytest.mark.parametrize("name", SETTINGS)
def test_the_choice_itself_has_no_margin_and_most_others_have_a_large_one(name: str) -> None:
    generator = np.random.default_rng(8)
    for index in range(20):
        row = place(SETTINGS[name], index)
        logits = generator.normal(0, 3, VOCAB)
        token = chosen(logits, row)
        assert token_margin(logits, row, token, 1e-3) <= 1e-3
        margins = [token_margin(logits, row, other, 1e-3) for other in range(0, VOCAB, 7) if other != token]
        assert np.mean([margin > 0.5 for margin in margins]) > 0.8


def test_a_forbidden_token_is_infinitely_far() -> None:
    logits = np.zeros(VOCAB)
    logits[3] = -np.inf
    assert token_margin(logits, place(SETTINGS["greedy"], 0), 3, 1.0) == np.inf
    assert token_margin(logits, place(SETTINGS["plain"], 0), 3, 1.0) == np.inf


def test_support_is_measured_from_the_edge_of_the_filter() -> None:
    logits = np.array([3.0, 2.0, 1.0, 0.0])
    row = place(SamplingParams(temperature=2.0, top_k=2), 0)
    assert [support_margin(logits, row, token) for token in range(4)] == pytest.approx([0, 0, 1.0, 2.0])
