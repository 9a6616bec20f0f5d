"""Which chunks were deleted since a moment: what was wanted before that is not computed after it."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable


class Forgotten:
    """Remembers the last `most` names that were deleted. A moment is a reading of the `clock`, time.perf_counter, so
    that it may be taken where nothing is known of this yet. For any thread."""

    def __init__(self, *, most: int = 1 << 16, clock: Callable[[], float] = time.perf_counter) -> None:
        assert most > 0, most
        self._most = most
        self._clock = clock
        self._moments: OrderedDict[str, float] = OrderedDict()  # of each name's last deletion, ascending
        self._known_from = -math.inf
        self._lock = threading.Lock()

    @property
    def now(self) -> float:
        return self._clock()

    def add(self, names: Iterable[str]) -> None:
        """They are deleted now."""
        with self._lock:
            now = self._clock()
            for name in names:
                self._moments[name] = now
                self._moments.move_to_end(name)
            while len(self._moments) > self._most:
                _, self._known_from = self._moments.popitem(last=False)

    def since(self, name: str, moment: float) -> bool:
        """Whether it was deleted at `moment` or after it; yes where that is too long ago to be known."""
        with self._lock:
            return moment <= self._known_from or self._moments.get(name, -math.inf) >= moment
