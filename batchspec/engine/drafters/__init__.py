"""Drafters: where proposals come from."""

from batchspec.engine.drafters.draft_model import DraftModelDrafter
from batchspec.engine.drafters.lookup_then_draft import LookupThenDraftDrafter
from batchspec.engine.drafters.prompt_lookup import PromptLookupDrafter

__all__ = ["DraftModelDrafter", "LookupThenDraftDrafter", "PromptLookupDrafter"]
