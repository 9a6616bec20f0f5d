"""Tiers under the prefix tree, as contracts: pages go when they are evicted and come back when a request needs them.

A page is named by all tokens up to its end (keys.py), so a tier needs no tree: a prompt is looked up page by page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..pages import Pages
from .keys import PageKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """A snapshot. `host_pages_total`, `host_pages_cached`, `disk_pages`, `disk_bytes` are sizes now, the others totals.

    `disk_failures` are writes that the file system refused; `disk_dropped_pages` left host memory before they were
    written; `disk_damaged_pages` were no good when they were read.
    """

    host_pages_total: int = 0
    host_pages_cached: int = 0
    host_saved_pages: int = 0
    host_loaded_pages: int = 0
    host_evicted_pages: int = 0
    disk_pages: int = 0
    disk_bytes: int = 0
    disk_written_pages: int = 0
    disk_read_pages: int = 0
    disk_damaged_pages: int = 0
    disk_dropped_pages: int = 0
    disk_failures: int = 0


class Loads(Protocol):
    """What is on its way into the pool while a step begins. The engine's stream waits for it, the host never does."""

    def wait(self, layer: int) -> None:
        """What the engine's stream is given from here on sees this layer loaded."""
        ...

    def begin(self) -> None:
        """Nothing is left to be asked for: it comes by itself."""
        ...

    def settle(self) -> None:
        """As `wait`, for all layers."""
        ...


class Fetch(Protocol):
    """Pages on their way from a slow tier to where `load` finds them."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not. Asking costs nothing."""
        ...


class PrefixTier(Protocol):
    """Keeps the KV of pages by name. All methods belong to the engine's thread; none but `wait` and `close` ever waits.

    The engine's stream is what runs its steps (on a CPU, the engine's thread itself).
    """

    @property
    def naming(self) -> PageKeys | None:
        """How pages are named; None where nothing is kept, and then nothing needs to be named or handed over."""
        ...

    @property
    def batch(self) -> int:
        """How many pages are best evicted at a time: a write-back of one page costs nearly as much as one of many."""
        ...

    @property
    def headroom(self) -> int:
        """How many free pages to keep, so that nobody has to wait until evicted ones have been copied."""
        ...

    def put(self, keys: Sequence[bytes], pages: Pages) -> None:
        """Keep the KV of the pool's `pages`, as far as there is room; later keys are forgotten before earlier ones.

        The pages may be given to others at once, who must `claim` them before they are written to.
        """
        ...

    def claim(self, pages: Pages) -> None:
        """What the engine's stream is given from here on may write to `pages`."""
        ...

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading keys `load` would find now; they count as just used."""
        ...

    def load(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Bring the KV of the leading keys that are here into the pool's `pages`; returns how many those are.

        The pages are filled for whoever waits for the `loads` of the next step.
        """
        ...

    def loads(self) -> Loads:
        """All that `load` began since the last call. The next step must wait for it, whoever asked for it."""
        ...

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        """Begin to bring pages of `keys` from a slow tier to where `match` finds them, if that beats computing them."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until any fetch ends, at most `seconds`."""
        ...

    def computed(self, tokens: int, seconds: float) -> None:
        """Note how long a prefill took: what fetching must beat."""
        ...

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """End the background work; what is not on disk by then is lost."""
        ...
