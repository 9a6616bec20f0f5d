"""The engine's sizes, checked where they are given."""

from dataclasses import dataclass

from ..prompt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """`kv_bytes` is the memory for KV, unless `pages` says how many pages there are.

    `step_tokens` bounds the rows of a step: it trades the time between tokens of running streams for prefill speed. A
    request waits for another one that is just computing at least `shared_tokens` of its prompt.
    """

    kv_bytes: int = 1 << 30
    pages: int | None = None
    page_size: int = 16
    step_tokens: int = 512
    max_running: int = 64
    shared_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "page_size", "step_tokens", "max_running", "shared_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.pages is not None and self.pages < 2:
            raise ConfigError(f"pages must be at least 2, found {self.pages}")
        if self.step_tokens < self.max_running:
            raise ConfigError(f"step_tokens ({self.step_tokens}) must not be below max_running ({self.max_running})")
