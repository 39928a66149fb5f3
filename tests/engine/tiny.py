"""Tiny models, a byte tokenizer and an engine around them, put together by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from batchspec.engine.acceptance import CoupledRule, RejectionRule
from batchspec.engine.drafters import PromptLookupDrafter
from batchspec.engine.engine import EngineParts, TorchEngine
from batchspec.engine.meter import Meter
from batchspec.engine.model import stop_token_ids, wrap_model
from batchspec.engine.prompts import OutputDecoder, PromptEncoder
from batchspec.engine.sampling import Sampler
from batchspec.engine.scheduler import Scheduler
from batchspec.profile.scope import ListSource
from batchspec.types import (
    NO_PROPOSAL,
    Completion,
    Drafter,
    DraftRow,
    EngineInfo,
    Method,
    Proposal,
    Request,
    Route,
    RowFailure,
    SamplingParams,
    StepReport,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": None,
    "pad_token_id": 258,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "mistral_sliding": MistralConfig(**SHAPE, sliding_window=16),
    "gemma2_sliding": Gemma2Config(**SHAPE, head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
    "gemma3_sliding": Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
}


def build_module(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config = copy.deepcopy(ARCHITECTURES[name])
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    return module.eval()


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (no merges), then <s>, </s>, <pad>, <end>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<end>"]})
    return fast


class EvenShares:
    rule = "even"

    def shares(self, num_positions: Sequence[int], kv_tokens: Sequence[int]) -> list[float]:
        return [1 / len(num_positions)] * len(num_positions)


class FixedRoute:
    def __init__(self, method: Method = Method.TARGET_ONLY, k: int = 0, min_match_tokens: int = 2) -> None:
        self._route = Route(method, k, "test", min_match_tokens)

    def route(self, request_class: str | None, occupancy: int) -> Route:
        return self._route

    def observe(self, step: StepReport) -> None:
        assert step.tokens <= sum(1 + accepted for _, _, accepted in step.drafts) + step.num_live


class OracleDrafter:
    """Knows the answer of every row (by index) and is right where `pattern`, cycled over positions, says so."""

    def __init__(self, answers: Mapping[int, Sequence[int]], pattern: Sequence[bool]) -> None:
        self._answers = answers
        self._pattern = pattern

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> Proposal:
        start = len(row.token_ids) - row.num_prompt_tokens
        tokens = self._answers[row.row_index][start : start + row.num_tokens]
        right = [self._pattern[i % len(self._pattern)] for i in range(len(tokens))]
        return Proposal(tuple(t if ok else (t + 1) % 250 for t, ok in zip(tokens, right, strict=True)))

    def forget(self, row_index: int) -> None:
        pass


class DecliningDrafter:
    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [NO_PROPOSAL for _ in rows]

    def forget(self, row_index: int) -> None:
        pass


def make_engine(
    module: Any,
    *,
    max_batch: int = 8,
    chunk: int = 8,
    num_blocks: int | None = None,
    drafters: Mapping[Method, Drafter] | None = None,
    tokenizer: Any = None,
    rule: str = "coupled",
    shares_prefixes: bool = True,
) -> TorchEngine:
    model = wrap_model("tiny", copy.deepcopy(module))
    tokenizer = tokenizer or byte_tokenizer()
    kv = model.new_cache(num_blocks or 1 + max_batch * 16, max_batch)
    stop_ids = stop_token_ids(model.module)
    return TorchEngine(
        EngineParts(
            model=model,
            kv=kv,
            scheduler=Scheduler(kv, max_batch, chunk, step_prefill_tokens=2 * chunk, shares_prefixes=shares_prefixes),
            encoder=PromptEncoder(tokenizer, model.context_tokens),
            decoder=OutputDecoder(tokenizer),
            rule=(RejectionRule if rule == "rejection" else CoupledRule)(Sampler(stop_ids)),
            stop_ids=stop_ids,
            drafters={Method.PROMPT_LOOKUP: PromptLookupDrafter(), **(drafters or {})},
            attribution=EvenShares(),
            meter=Meter(),
            info=EngineInfo("torch", "tiny", str(model.dtype), "cpu", max_batch, None),
        )
    )


def run(
    engine: TorchEngine, requests: Sequence[Request], route: FixedRoute | None = None
) -> dict[int, Completion | RowFailure]:
    """All outcomes by row index; checks every identity and that no KV block is lost."""
    outcomes: dict[int, Completion | RowFailure] = {}
    for outcome in engine.run(ListSource(requests), route or FixedRoute()):
        assert outcome.row_index not in outcomes
        outcomes[outcome.row_index] = outcome
        if isinstance(outcome, Completion):
            outcome.stats.check(outcome.output_tokens)
    engine.parts.kv.check_integrity(engine.parts.scheduler.prefixes.kept_blocks)
    assert set(outcomes) == {request.row_index for request in requests}
    return outcomes


def generate(
    module: Any, prompt_ids: Sequence[int], max_new_tokens: int, eos: Sequence[int] = (), min_new_tokens: int = 0
) -> list[int]:
    """The oracle: transformers' own greedy generate."""
    with torch.inference_mode():
        ids = torch.tensor([list(prompt_ids)])
        output = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens or None,
            eos_token_id=list(eos) or None,
            pad_token_id=258,
            repetition_penalty=1.0,
        )
    return output[0, len(prompt_ids) :].tolist()


def requests_for(prompts: Sequence[str], **sampling: Any) -> list[Request]:
    return [Request(i, prompt=p, sampling=SamplingParams(**sampling)) for i, p in enumerate(prompts)]
