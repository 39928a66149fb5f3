"""How far a written token is from the one that other logits would have given, in logits: 0 means a tie.

Two forwards of one model differ by rounding. A token that rounding alone can bring about has a margin within the noise
of the logits; any other is a fault. The noise counts where filters decide too: near the edge of top-k, top-p or min-p
a token may be kept in one forward and not in the other.
"""

from __future__ import annotations

import numpy as np

from batchspec.engine import noise
from batchspec.engine.sampling import FIRST_CANDIDATES, Floats, SampledRow
from batchspec.types import SamplingParams


def token_margin(logits: Floats, row: SampledRow, token: int, noise_logits: float) -> float:
    """The least change of a difference between two logits [vocab] (processors applied) that makes `token` the choice.

    `noise_logits` is how much such a difference may change by rounding: what it leaves open counts for the token.
    Infinite where no change does it (an end token before `min_new_tokens`).
    """
    params = row.sampling
    if np.isneginf(logits[token]):
        return float("inf")
    if params.greedy:
        return float(logits.max() - logits[token])
    scaled = logits / params.temperature
    log_p = scaled - _log_sum_exp(scaled)
    inside = filter_margins(log_p, params) * params.temperature
    with np.errstate(divide="ignore"):
        scores = log_p - np.log(_exponential(row, np.arange(len(log_p))))
    if _is_filtered(params):
        race = _best(scores, inside > noise_logits) - scores[token]
    else:
        race = _unfiltered_race(log_p, scores, row, token, noise_logits / params.temperature)
    return float(max(0.0, -inside[token], race * params.temperature))


def support_margin(logits: Floats, row: SampledRow, token: int) -> float:
    """How far outside the filters of its row a token is, in logits; 0 inside."""
    params = row.sampling
    scaled = logits / params.temperature
    inside = filter_margins(scaled - _log_sum_exp(scaled), params)[token]
    return float(max(0.0, -inside * params.temperature))


def filter_margins(log_p: Floats, params: SamplingParams) -> Floats:
    """How far inside each token is [vocab] of top-k, top-p and min-p, in units of log probability; below 0 outside."""
    inside = np.where(np.isneginf(log_p), -np.inf, np.inf)
    order = np.argsort(-log_p, kind="stable")
    ranked = log_p[order]
    if 0 < params.top_k < len(log_p):
        last_in, first_out = ranked[params.top_k - 1], ranked[params.top_k]
        inside = np.minimum(inside, np.where(log_p >= last_in, log_p - first_out, log_p - last_in))
        ranked = np.where(ranked >= last_in, ranked, -np.inf)
        ranked = ranked - _log_sum_exp(ranked)
    if params.top_p < 1:
        before = np.cumsum(np.exp(ranked)) - np.exp(ranked)
        with np.errstate(divide="ignore"):
            beyond = _log_odds(params.top_p) - _log_odds(np.clip(before, 0.0, 1 - 1e-15))
        by_token = np.empty_like(beyond)
        by_token[order] = beyond
        inside = np.minimum(inside, by_token)
    if params.min_p > 0:
        inside = np.minimum(inside, log_p - ranked[0] - np.log(params.min_p))
    return inside


def _unfiltered_race(log_p: Floats, scores: Floats, row: SampledRow, token: int, noise_log_p: float) -> float:
    """The margin of a draw over the whole vocabulary: the likeliest tokens race by themselves, the rest race as one and
    then among each other. Next to the border between them a token may be on either side."""
    if len(log_p) <= FIRST_CANDIDATES:
        return float(scores.max() - scores[token])
    ranked = np.sort(log_p)[::-1]
    border = (ranked[FIRST_CANDIDATES - 1] + ranked[FIRST_CANDIDATES]) / 2
    surely_head, surely_rest = log_p > border + noise_log_p, log_p < border - noise_log_p
    rest_mass = np.exp(ranked[FIRST_CANDIDATES:]).sum()
    with np.errstate(divide="ignore"):
        rest_score = np.log(rest_mass) - np.log(_exponential(row, np.array([noise.REST_OF_VOCABULARY])))[0]
    best_head = _best(scores, surely_head)
    as_head = max(best_head, rest_score) - scores[token]
    as_rest = max(best_head - rest_score, _best(scores, surely_rest) - scores[token])
    if surely_head[token]:
        return float(as_head)
    return float(as_rest if surely_rest[token] else min(as_head, as_rest))


def _best(scores: Floats, among: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    return float(scores[among].max(initial=-np.inf))


def _exponential(row: SampledRow, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Floats:
    key = noise.stream_key(row.sampling.seed, row.row_key)
    return noise.exponential(np.array([key], dtype=np.uint64), np.array([row.output_index]), tokens)


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _log_sum_exp(values: Floats) -> float:
    top = values.max()
    return float(top + np.log(np.exp(values - top).sum()))


def _log_odds(mass: Floats | float) -> Floats:
    return np.asarray(np.log(mass) - np.log1p(-np.asarray(mass)))
