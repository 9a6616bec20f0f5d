"""The engine's sizes, checked where they are given."""

from dataclasses import dataclass
from pathlib import Path

from ..prompt.errors import ConfigError
from .types import KVDtype

# The default where guessing was measured to pay: on a CPU, and on a GPU if its steps run as graphs.
GUESSED_TOKENS = 15
# Of the steps with prefills that may run as graphs: larger ones are bound by what they compute.
LEAST_GRAPH_ROWS, MOST_GRAPH_ROWS = 16, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """`kv_bytes` is the memory for KV, unless `pages` says how many pages there are; `kv_dtype` is how it is stored: as
    the model computes it (auto), or rounded to 8 bits.

    `step_tokens` bounds the rows of a step. While streams run, a step with prefills shall take about `stall` times as
    long as one without (None: whatever `step_tokens` takes), but has at least `least_prefill` rows of prefills. A
    request waits for another one that is just computing at least `shared_tokens` of its prompt. Up to
    `guessed_tokens` tokens a request are guessed ahead from what its text repeats, where that pays (None: by the
    device; 0: never).

    On a GPU, steps with prefills of up to `graph_rows` rows (16 to 512, or the next of twelve sizes below) run as CUDA
    graphs, those that reuse stored KV or score a prompt but for their attention; 0: none do, and no tokens are guessed.

    What the prefix tree gives up is kept in `host_bytes` of host memory, and from there written to `disk_bytes` of
    files below `disk_path`, which other engines may share; 0 turns a tier off. The disk's pages pass through host
    memory.
    """

    kv_bytes: int = 1 << 30
    kv_dtype: KVDtype = "auto"
    pages: int | None = None
    page_size: int = 16
    step_tokens: int = 512
    stall: float | None = 2.5
    least_prefill: int = 16
    max_running: int = 64
    shared_tokens: int = 64
    guessed_tokens: int | None = None
    graph_rows: int = MOST_GRAPH_ROWS
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_path: Path | None = None

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "page_size", "step_tokens", "least_prefill", "max_running", "shared_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, found {getattr(self, name)}")
        if self.disk_bytes and (self.disk_path is None or not self.host_bytes):
            raise ConfigError(
                "disk_bytes needs disk_path, the folder of the files, and host_bytes, which they pass through"
            )
        if self.pages is not None and self.pages < 2:
            raise ConfigError(f"pages must be at least 2, found {self.pages}")
        if self.guessed_tokens is not None and self.guessed_tokens < 0:
            raise ConfigError(f"guessed_tokens must not be negative, found {self.guessed_tokens}")
        if self.graph_rows and not LEAST_GRAPH_ROWS <= self.graph_rows <= MOST_GRAPH_ROWS:
            raise ConfigError(
                f"graph_rows must be 0 or from {LEAST_GRAPH_ROWS} to {MOST_GRAPH_ROWS}, found {self.graph_rows}"
            )
        if self.stall is not None and self.stall <= 1:
            raise ConfigError(f"stall must be above 1, found {self.stall}")
        if self.step_tokens < self.max_running:
            raise ConfigError(f"step_tokens ({self.step_tokens}) must not be below max_running ({self.max_running})")

    def guessed(self, device: str) -> int:
        """How many tokens of a request are guessed at most on a device of type `device`. May raise ConfigError."""
        if device == "cuda" and self.guessed_tokens and not self.graph_rows:
            raise ConfigError("guessed_tokens needs steps that run as graphs on a GPU: set graph_rows, or leave it out")
        if self.guessed_tokens is not None:
            return self.guessed_tokens
        return GUESSED_TOKENS if device in ("cpu", "cuda") else 0
