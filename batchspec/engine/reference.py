"""A second opinion on an answer: the model as `transformers` runs it, one row at a time, with its own attention and
cache. Nothing of the packed engine and its kernels takes part; prompts, processors and noise are the same functions."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from batchspec.engine.margins import support_margin, token_margin
from batchspec.engine.model import DTYPES, stop_token_ids
from batchspec.engine.plain import plain_products
from batchspec.engine.processors import apply_processors
from batchspec.engine.prompts import OutputDecoder, PromptEncoder, load_tokenizer
from batchspec.engine.sampling import SampledRow, Sampler
from batchspec.errors import RowError, UsageError
from batchspec.types import FinishReason, Request

FINER_DTYPES = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}

# Positions in one forward: bounds the memory of attention scores and logits, whatever the length of a row.
_CHUNK_TOKENS = 1024
# Pairs of tokens (the likeliest and each of the next ones) whose difference is compared in two dtypes.
_NOISE_PAIRS = 8
_NOISE_PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """A row as the output has it. `draws_its_tokens` is False where the text depends on proposals too (sampled and
    speculative under the rejection rule): then a token must only be one that the target may draw."""

    request: Request
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    input_tokens: int
    draws_its_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Difference:
    """The output's token at `output_index` is not the reference's. `margin_logits` as in `token_margin`."""

    output_index: int
    written: int
    expected: int | None
    margin_logits: float


@dataclass(frozen=True, slots=True)
class RowCheck:
    """What the reference says of a row. `problem` is a fault of the row as a whole: its prompt, its end, its text."""

    num_tokens: int
    differences: tuple[Difference, ...] = ()
    problem: str | None = None


class Reference:
    """The model of a directory in the dtype of the run, on one device.

    `noise_logits` is how much a difference between two logits may be off by rounding: the dtype's own largest effect on
    `noise_rows`, found by comparing with the next finer dtype, twice, since the run and the audit each have it.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        device: str,
        noise_rows: Sequence[WrittenRow],
        neutralize_special_tokens: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise UsageError(
                f"the output was made in dtype {dtype}, which cannot be audited; known: {', '.join(DTYPES)}"
            )
        self._device = torch.device(device)
        tokenizer = load_tokenizer(path)
        self._decoder = OutputDecoder(tokenizer)
        finer = FINER_DTYPES.get(DTYPES[dtype])
        module = _load(path, finer or DTYPES[dtype], self._device)
        self._encoder = PromptEncoder(
            tokenizer, module.config.get_text_config().max_position_embeddings, neutralize_special_tokens
        )
        gaps = [self._gaps(module, row) for row in noise_rows]
        if finer is not None:
            del module
            gc.collect()
            module = _load(path, DTYPES[dtype], self._device)
        self._module = module
        self._stop_ids = stop_token_ids(module)
        self._sampler = Sampler(self._stop_ids)
        self.noise_positions = sum(len(ids) for ids, _ in gaps)
        self.noise_logits = 2 * max(
            (self._largest_change(row, *found) for row, found in zip(noise_rows, gaps, strict=True)), default=0.0
        )

    def check(self, row: WrittenRow) -> RowCheck:
        """Teacher-force the row's tokens and say where they differ from what the reference chooses there."""
        try:
            prompt_ids = self._encoder.encode(row.request)
        except RowError as error:
            return RowCheck(len(row.token_ids), problem=f"its prompt is refused here: {error.error_type}")
        problem = self._problem(row, prompt_ids)
        if problem is not None:
            return RowCheck(len(row.token_ids), problem=problem)
        differences: list[Difference] = []
        for first, logits in self._logits(self._module, [*prompt_ids, *row.token_ids[:-1]], len(prompt_ids) - 1):
            sampled = [self._sampled(row, prompt_ids, first + i) for i in range(len(logits))]
            differences += self._differences(row, logits, sampled)
        return RowCheck(len(row.token_ids), tuple(differences))

    def _differences(
        self, row: WrittenRow, logits: torch.Tensor, sampled: Sequence[SampledRow]
    ) -> Iterator[Difference]:
        """Where a piece of the row differs; logits [positions, vocab]."""
        expected: Sequence[int | None] = [None] * len(sampled)
        if row.draws_its_tokens:
            expected = self._sampler.choose(logits.clone(), sampled)
        for i, place in enumerate(sampled):
            written = row.token_ids[place.output_index]
            if written == expected[i]:
                continue
            processed = apply_processors(logits[i : i + 1].clone(), [place], sorted(self._stop_ids))
            values = processed[0].double().cpu().numpy()
            if row.draws_its_tokens:
                margin = token_margin(values, place, written, self.noise_logits)
            else:
                margin = support_margin(values, place, written)
            # a repetition penalty scales logits, and their noise with them
            scale = max(row.request.sampling.repetition_penalty, 1 / row.request.sampling.repetition_penalty)
            if margin > 0 or row.draws_its_tokens:
                yield Difference(place.output_index, written, expected[i], margin / scale)

    def _problem(self, row: WrittenRow, prompt_ids: Sequence[int]) -> str | None:
        """What is wrong with the row apart from its choice of tokens; None where nothing is."""
        params, ids = row.request.sampling, list(row.token_ids)
        if len(prompt_ids) != row.input_tokens:
            return f"its prompt has {len(prompt_ids)} tokens here, {row.input_tokens} in the output"
        if not ids or max(ids) >= self._module.get_output_embeddings().out_features:
            return "it has no tokens, or ids outside the vocabulary"
        end = next((i + 1 for i, token in enumerate(ids) if token in self._stop_ids), None)
        written = ids[:-1] if end == len(ids) else ids
        match = self._decoder.find_stop(written, 0, params.stop, params.min_new_tokens) if params.stop else None
        text = match[1] if match is not None else self._decoder.text(written)
        stops_at = min([place for place in (end, match[0] if match else None) if place is not None], default=None)
        ended = stops_at if stops_at is not None else params.max_new_tokens
        if len(ids) != ended:
            return f"it has {len(ids)} tokens and should have ended at {ended}"
        reason = FinishReason.STOP if stops_at is not None else FinishReason.LENGTH
        if row.finish_reason != reason:
            return f"its finish_reason is {row.finish_reason} and should be {reason}"
        return "its text is not the decode of its token ids" if text != row.text else None

    def _sampled(self, row: WrittenRow, prompt_ids: Sequence[int], output_index: int) -> SampledRow:
        return SampledRow(
            sampling=row.request.sampling,
            row_key=row.request.row_key,
            output_index=output_index,
            token_ids=prompt_ids,
            num_prompt_tokens=len(prompt_ids),
            block=row.token_ids[:output_index],
        )

    @torch.inference_mode()
    def _logits(self, module: Any, tokens: Sequence[int], first_wanted: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits [n, vocab] of the positions from `first_wanted` on, in pieces, each with how many came before it."""
        from transformers import DynamicCache

        # transformers 5.24 renamed the keyword
        keyword = "cache" if "cache" in signature(module.forward).parameters else "past_key_values"
        cache = {keyword: DynamicCache(config=module.config)}
        for start in range(0, len(tokens), _CHUNK_TOKENS):
            piece = tokens[start : start + _CHUNK_TOKENS]
            num_wanted = start + len(piece) - max(start, first_wanted)
            with plain_products(module):
                logits = module(
                    input_ids=torch.tensor([piece], device=self._device),
                    use_cache=True,
                    logits_to_keep=max(1, num_wanted),
                    **cache,
                ).logits[0]
            if num_wanted > 0:
                yield max(start, first_wanted) - first_wanted, logits

    def _noise_logits(self, module: Any, row: WrittenRow) -> Iterator[torch.Tensor]:
        """Logits of the answer's positions and of the last ones of its prompt."""
        try:
            prompt_ids = self._encoder.encode(row.request)
        except RowError:
            return
        first = max(0, len(prompt_ids) - 1 - _NOISE_PROMPT_TOKENS)
        for _, logits in self._logits(module, [*prompt_ids, *row.token_ids[:-1]], first):
            yield logits.double()

    def _gaps(self, module: Any, row: WrittenRow) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens at each position, ids [n, pairs + 1], and how far each is below the first."""
        found = [logits.topk(1 + _NOISE_PAIRS) for logits in self._noise_logits(module, row)]
        if not found:
            return torch.empty(0, 1 + _NOISE_PAIRS, dtype=torch.long), torch.empty(0, 1 + _NOISE_PAIRS)
        values = torch.cat([top.values for top in found])
        return torch.cat([top.indices for top in found]), values[:, :1] - values

    def _largest_change(self, row: WrittenRow, ids: torch.Tensor, gaps: torch.Tensor) -> float:
        """How much the run's dtype changes any of these gaps of the finer one, at most."""
        if not len(ids):
            return 0.0
        values = torch.cat(list(self._noise_logits(self._module, row))).gather(1, ids)
        return float((values[:, :1] - values - gaps).abs().max())


def _load(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {path}: not a model that transformers can read: {error}") from None
    return module.to(device).eval().requires_grad_(False)
