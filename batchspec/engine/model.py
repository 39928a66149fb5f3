"""Loading a causal LM and running packed forwards with it. Used for the target and for draft models alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batchspec.engine import attention
from batchspec.engine.kv_cache import KVCache, LayerShape
from batchspec.engine.packed import Segment, forward_packed, pack
from batchspec.errors import BatchspecError, MissingDependencyError, UnsupportedModelError, UsageError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

# A forward of fewer rows takes other matrix kernels, with other rounding; rounding up costs next to nothing.
MIN_ROWS = {torch.bfloat16: 2, torch.float16: 2}
MIN_ROWS_DEFAULT = 4


@dataclass(frozen=True)
class PackedModel:
    """A model whose forward serves many sequences as one row of packed tokens, K and V in a paged cache."""

    name: str
    module: Any
    dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerShape, ...]
    context_tokens: int
    vocab_size: int
    refused_layers: tuple[str, ...] = ()
    """Layers of a known class whose fused form answers otherwise than they do."""

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    def new_cache(self, num_blocks: int, max_sequences: int) -> KVCache:
        return KVCache(self.layers, num_blocks, max_sequences, self.context_tokens, self.dtype, self.device)

    def forward(self, segments: Sequence[Segment], kv: KVCache) -> torch.Tensor:
        """Run the segments' tokens, write their K and V; logits [wanted rows, vocab], segment by segment."""
        step = pack(segments, kv, MIN_ROWS.get(self.dtype, MIN_ROWS_DEFAULT), self.device)
        logits = forward_packed(self.module, step)[: step.num_logit_rows]
        if not step.num_logit_rows and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no token will be read, and the seconds are this step's
        return logits


def load_model(
    path: Path, dtype: str, device: torch.device, refused_layers: tuple[str, ...] | None = None
) -> PackedModel:
    """Load, refuse what cannot be reproduced exactly, and check a packed forward against the model's own, unless that
    was done before and `refused_layers` was found.

    `dtype` "auto" takes the dtype that the checkpoint declares (float32 where it declares none).
    Raises UsageError (no such model, unknown dtype), MissingDependencyError (another package has to read the weights)
    and UnsupportedModelError (names the reason).
    """
    from batchspec.engine import checks

    attention.register()
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {path}: not a model that transformers can read: {error}") from None
    checks.refuse_unsupported_config(config)
    chosen = choose_dtype(config, dtype)
    try:
        module = AutoModelForCausalLM.from_pretrained(path, dtype=chosen, attn_implementation="eager")
    except ImportError as error:  # for weights that are stored quantized
        missing = "; pip install 'batchspec[quantized]' brings accelerate" if "accelerate" in str(error) else ""
        raise MissingDependencyError(f"{path}: {error}{missing}") from None
    except ValueError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None
    except OSError as error:
        raise BatchspecError(f"{path}: weights cannot be read: {error}") from error
    return wrap_model(str(path), module.to(device), refused_layers)


def wrap_model(name: str, module: Any, refused_layers: tuple[str, ...] | None = None) -> PackedModel:
    """Make a loaded `transformers` causal LM serve packed forwards, in place, and check it; see load_model."""
    from batchspec.engine import checks

    attention.register()
    checks.refuse_unsupported_config(module.config)
    module.eval().requires_grad_(False)
    if refused_layers is None:
        layers, refused_layers = checks.prepare_and_check(module)
    else:
        layers = checks.prepare(module, refused_layers)
    text_config = module.config.get_text_config()
    return PackedModel(
        name=name,
        module=module,
        dtype=module.dtype,
        device=module.device,
        layers=layers,
        context_tokens=text_config.max_position_embeddings,
        vocab_size=module.get_output_embeddings().out_features,
        refused_layers=refused_layers,
    )


def choose_dtype(config: Any, dtype: str) -> torch.dtype:
    if dtype == "auto":
        return config.dtype or torch.float32
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: unknown; choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def stop_token_ids(module: Any) -> frozenset[int]:
    """Every end-of-sequence id that the target declares; its generation config wins over its config."""
    declared = module.generation_config.eos_token_id
    if declared is None:
        declared = module.config.get_text_config().eos_token_id
    if declared is None:
        return frozenset()
    return frozenset([declared] if isinstance(declared, int) else declared)
