"""What vLLM can serve with one engine. Loads no library: the parent plans with it."""

from __future__ import annotations

from batchspec.types import Method, Route, SamplingParams

TARGET_ONLY_REASON = "vLLM: stop, min_p or logit_bias"
TARGET_ONLY_COLUMNS = frozenset({"stop", "min_p", "logit_bias"})


def engine_key(route: Route) -> tuple[str, int, int]:
    """What a vLLM engine is built for: it speculates for all of its rows alike, or for none."""
    is_lookup = route.method is Method.PROMPT_LOOKUP
    return route.method.value, route.num_speculative_tokens, route.min_match_tokens if is_lookup else 0


def needs_target_only(sampling: SamplingParams) -> bool:
    """Whether vLLM cannot do this with speculation: it refuses `min_p` and `logit_bias`, and loses the counters of rows
    that a stop string ends."""
    return bool(sampling.stop or sampling.logit_bias) or sampling.min_p > 0
