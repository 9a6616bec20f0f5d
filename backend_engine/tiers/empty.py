"""No tiers: what is evicted is gone. And no loads, for steps that have nothing to wait for."""

from collections.abc import Sequence

from ..pages import Pages
from .base import Fetch, Loads, TierStats


class NoLoads:
    """See base.Loads."""

    def wait(self, layer: int) -> None:
        return

    def begin(self) -> None:
        return

    def settle(self) -> None:
        return


class Fetched:
    """A fetch with nothing to do. See base.Fetch."""

    done = True


NO_LOADS = NoLoads()
NOTHING = Fetched()


class EmptyTier:
    """See base.PrefixTier."""

    naming = None
    batch = 1
    headroom = 0

    def put(self, keys: Sequence[bytes], pages: Pages) -> None:
        return

    def claim(self, pages: Pages) -> None:
        return

    def match(self, keys: Sequence[bytes]) -> int:
        return 0

    def load(self, keys: Sequence[bytes], pages: Pages) -> int:
        return 0

    def loads(self) -> Loads:
        return NO_LOADS

    def fetch(self, keys: Sequence[bytes]) -> Fetch:
        return NOTHING

    def wait(self, seconds: float) -> None:
        return

    def computed(self, tokens: int, seconds: float) -> None:
        return

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        return
