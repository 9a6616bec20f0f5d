"""What the engine counts."""

from dataclasses import dataclass

from .tiers.base import TierStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(TierStats):
    """A snapshot. Pages and requests are counts now, the others totals since the start."""

    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0  # known to the prefix tree, in use or not
    steps: int = 0
    preemptions: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queried_tokens: int = 0  # prompt tokens that were looked up in the prefix tree
    loaded_tokens: int = 0  # brought back by a tier, also for requests that were preempted
    blended_tokens: int = 0  # of the cached ones, those of blended prompts
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0  # guessed ahead
    accepted_tokens: int = 0  # of these, drawn
    out_of_memory: int = 0  # steps


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the start."""

    preemptions: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    blended_tokens: int = 0
    queried_tokens: int = 0  # of prompts that were looked up in the prefix tree
