"""The answers of the fake engine: pure functions of the row, drawn from a hash of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from batchspec.types import FinishReason, Request, SamplingParams

EOS_TOKEN_ID = 256
_ONSETS = ("b", "ch", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z")
_ENDINGS = ("a", "e", "i", "o", "u", "an", "en", "in", "on", "un", "ar", "or", "é", "ü", "文", "🙂")
WORDS = tuple(onset + ending for onset in _ONSETS for ending in _ENDINGS)


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def decode(token_ids: Sequence[int]) -> str:
    """The text of output ids, the end token left out."""
    return " ".join([WORDS[token_id] for token_id in token_ids if token_id != EOS_TOKEN_ID])


def count_input_tokens(request: Request) -> int:
    """One per four bytes, a start token, and two per message for its role."""
    if request.prompt is not None:
        return 1 + len(request.prompt.encode("utf-8", errors="replace")) // 4
    contents = [str(message.get("content")).encode("utf-8", errors="replace") for message in request.messages or ()]
    return 1 + sum(2 + len(content) // 4 for content in contents)


def answer(request: Request) -> Answer:
    """The text of a row: greedy rows by their prompt alone, sampled rows by row key and seed as well.

    Most rows end after 2 to 9 words, one in 32 after 10 to 73. A larger `max_new_tokens` continues the same text.
    """
    sampling = request.sampling
    stream = hashlib.shake_128(_row_key(request))
    drawn = stream.digest(96)
    num_words = 2 + drawn[0] % 8 + (8 + drawn[0] // 4 if drawn[1] < 8 else 0)
    num_words = max(num_words, sampling.min_new_tokens)
    num_tokens = min(num_words, sampling.max_new_tokens)
    if num_tokens > len(drawn) - 2:
        drawn = stream.digest(num_tokens + 2)
    token_ids = tuple(drawn[2 : num_tokens + 2])
    if sampling.stop:
        stopped = _stop_at_string(token_ids, sampling)
        if stopped is not None:
            return stopped
    text = decode(token_ids)
    if num_words < sampling.max_new_tokens:
        return Answer((*token_ids, EOS_TOKEN_ID), text, FinishReason.STOP)
    return Answer(token_ids, text, FinishReason.LENGTH)


def accepted_draft_mask(request: Request, num_tokens: int, acceptance: float) -> list[bool]:
    """For each output position, whether a draft token proposed there is the target's own token."""
    drawn = hashlib.shake_128(b"draft" + _row_key(request)).digest(num_tokens)
    threshold = acceptance * 256
    return [byte < threshold for byte in drawn]


def _row_key(request: Request) -> bytes:
    prompt = request.prompt
    if prompt is None:
        prompt = json.dumps(request.messages, sort_keys=True, default=str)
    settings = _text_settings(request.sampling)
    key = f"{settings}\0{prompt}" if request.sampling.greedy else f"{request.row_key}\0{settings}\0{prompt}"
    return key.encode("utf-8", errors="replace")


@lru_cache(maxsize=256)
def _text_settings(sampling: SamplingParams) -> str:
    """The settings that change which tokens are drawn; lengths and stops only cut the same text."""
    processors = (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.logit_bias,
    )
    if sampling.greedy:
        return repr(processors)
    return repr((processors, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed))


def _stop_at_string(token_ids: tuple[int, ...], sampling: SamplingParams) -> Answer | None:
    """The answer cut at its earliest stop string, None where no stop string occurs."""
    for num_tokens in range(max(1, sampling.min_new_tokens), len(token_ids) + 1):
        text = decode(token_ids[:num_tokens])
        starts = [start for stop in sampling.stop if (start := text.find(stop)) >= 0]
        if starts:
            return Answer(token_ids[:num_tokens], text[: min(starts)], FinishReason.STOP)
    return None
