"""How often things were seen: counts that are forgotten in the order in which they were not seen for longest."""

import threading
from collections import OrderedDict
from collections.abc import Hashable


class Sights:
    """Counts of at most `most` things. For any thread."""

    def __init__(self, *, most: int) -> None:
        assert most > 0, most
        self._most = most
        self._times: OrderedDict[Hashable, int] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, what: Hashable) -> int:
        """It was seen: how often by now."""
        with self._lock:
            times = self._times[what] = self._times.pop(what, 0) + 1
            if len(self._times) > self._most:
                self._times.popitem(last=False)
            return times

    def times(self, what: Hashable) -> int:
        """How often it was seen, as far as that is remembered."""
        with self._lock:
            return self._times.get(what, 0)
