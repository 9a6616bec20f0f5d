"""Which chunks were deleted since a moment: what was wanted before that is not computed after it."""

import threading
from collections import OrderedDict
from collections.abc import Iterable


class Forgotten:
    """Remembers the last `most` names that were deleted. A moment is the number of `add`s before it. For any thread."""

    def __init__(self, *, most: int = 1 << 16) -> None:
        assert most > 0, most
        self._most = most
        self._moments: OrderedDict[str, int] = OrderedDict()  # of each name's last deletion, ascending
        self._now = self._known_from = 0
        self._lock = threading.Lock()

    @property
    def now(self) -> int:
        return self._now

    def add(self, names: Iterable[str]) -> None:
        """They are deleted now."""
        with self._lock:
            self._now += 1
            for name in names:
                self._moments[name] = self._now
                self._moments.move_to_end(name)
            while len(self._moments) > self._most:
                _, self._known_from = self._moments.popitem(last=False)

    def since(self, name: str, moment: int) -> bool:
        """Whether it was deleted after `moment`; yes where that is too long ago to be known."""
        with self._lock:
            return moment < self._known_from or self._moments.get(name, 0) > moment
