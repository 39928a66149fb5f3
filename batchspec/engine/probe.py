"""Do results depend on what shares the batch? Tried on the loaded models, at start-up."""

from __future__ import annotations

import numpy as np
import torch

from batchspec.engine.kv_cache import blocks_for
from batchspec.engine.model import PackedModel
from batchspec.engine.packed import Segment
from batchspec.engine.sampling import SampledRow, Sampler
from batchspec.types import SamplingParams

# Ways of choosing a token whose arithmetic differs: one candidate, a filtered race, a race over the whole vocabulary.
_SAMPLING = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.2, top_k=50, min_p=0.01),
    SamplingParams(temperature=1.5),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
)

_PREFILL_MATES = 12

# Rows of a mate in a decoding step: few, so that there are many sequences.
_MATE_ROWS = 4

# More than a chunk of prefill, and than a partition of keys that the attention kernel merges.
_PROMPT_TOKENS = 270


def probe_engine(model: PackedModel, sampler: Sampler) -> str | None:
    """None where nothing that was tried (forwards, choices of tokens) changed the bits of a row, else what did."""
    return probe_batch_invariance(model) or probe_sampling(sampler, model)


def probe_sampling(sampler: Sampler, model: PackedModel, num_rows: int = 64) -> str | None:
    """None where a row's distribution has the same bits alone and beside rows of all settings, else what differed."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(num_rows, model.vocab_size, generator=generator).mul_(4).to(model.device, model.dtype)
    rows = [SampledRow(_SAMPLING[i % len(_SAMPLING)], f"row:{i}", i, [1, 2, 3, 3], 1) for i in range(num_rows)]
    chosen, shares = sampler.choose(logits.clone(), rows), sampler.distribution(logits.clone(), rows)
    for index in range(2 * len(_SAMPLING)):
        row, own = rows[index], logits[index : index + 1]
        same = np.array_equal(sampler.distribution(own.clone(), [row])[0], shares[index])
        if not same or sampler.choose(own.clone(), [row]) != chosen[index : index + 1]:
            return f"sampling at temperature {row.sampling.temperature:g} beside {num_rows - 1} other rows"
    return None


def probe_batch_invariance(model: PackedModel, max_rows: int = 160) -> str | None:
    """None where a sequence's logits have the same bits alone and in every mix tried, else what differed first.

    Tried: a prefill alone and among other prefills and a row that decodes (470 positions, or what the context holds);
    six tokens decoded one by one, in blocks, in steps of 7 to `max_rows` rows, and beside those prefills.
    """
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(model.vocab_size, (count,), generator=generator).tolist()

    prompt, answer, filler = tokens(min(_PROMPT_TOKENS, model.context_tokens - 32)), tokens(6), tokens(16)
    num_fillers = max(_PREFILL_MATES, -(-max_rows // _MATE_ROWS))
    length = len(prompt) + len(answer)
    kv = model.new_cache(1 + 2 * blocks_for(length) + num_fillers * blocks_for(len(filler)), 2 + num_fillers)
    alone, mixed, *others = [kv.acquire_slot() for _ in range(2 + num_fillers)]
    for slot in (alone, mixed):
        kv.reserve(slot, length)
    for slot in others:
        kv.reserve(slot, len(filler))

    def decode(slot: int, first: int, last: int) -> Segment:
        return Segment(slot, answer[first:last], len(prompt) + first, False, range(last - first))

    def prefill(slot: int, ids: list[int]) -> Segment:
        return Segment(slot, ids, 0, True, (len(ids) - 1,))

    every_position = Segment(alone, prompt, 0, True, range(len(prompt)))
    expected_prefill = model.forward([every_position], kv)[-1]
    expected = torch.cat([model.forward([decode(alone, i, i + 1)], kv) for i in range(len(answer))])
    prefills = [prefill(mixed, prompt), *(prefill(s, filler) for s in others[:_PREFILL_MATES])]
    together = model.forward([decode(alone, 0, len(answer)), *prefills], kv)
    if not torch.equal(together[len(answer)], expected_prefill):
        return f"a prefill beside {len(prefills) - 1} others and a row that decodes"
    if not torch.equal(together[: len(answer)], expected):
        return f"{len(answer)} positions decoded beside {len(prefills)} prefills"
    for first, last in ((0, 2), (2, 6), (0, 6)):
        if not torch.equal(model.forward([decode(mixed, first, last)], kv), expected[first:last]):
            return f"{last - first} positions decoded in one step"
    num_rows = len(answer) + 1
    while num_rows <= max_rows:
        mates, left = [], num_rows - len(answer)
        for slot in others:
            block = filler[: min(left, _MATE_ROWS)]
            if block:
                mates.append(Segment(slot, block, 0, False, range(len(block))))
            left -= len(block)
        if not torch.equal(model.forward([decode(mixed, 0, 6), *mates], kv)[:6], expected):
            return f"a step of {num_rows} rows"
        num_rows = num_rows * 4 + 1
    return None
