"""Drafters: where proposals come from."""

from batchspec.engine.drafters.prompt_lookup import PromptLookupDrafter

__all__ = ["PromptLookupDrafter"]
