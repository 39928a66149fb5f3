"""A fast CPU forward: C kernels, compiled once per machine, under a `transformers` causal LM.

`prepare_model` packs a model's weights and fuses the layers it knows; `paged_attention` serves every other layer.
Results do not depend on the shape of the batch, bit for bit. Where `unavailable_reason` gives one, torch does the work.
"""

from batchspec.engine.cpu.kernels import argmax, attention_settings, unavailable_reason
from batchspec.engine.cpu.kernels import attention as paged_attention
from batchspec.engine.cpu.modules import prepare_model

__all__ = ["argmax", "attention_settings", "paged_attention", "prepare_model", "unavailable_reason"]
