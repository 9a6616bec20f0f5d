"""Who of the waiting comes next: by priority, then by what the tenant was served, then by arrival. It knows no pages.

Tenants (namespaces) are compared by a virtual token counter (Sheng et al., "Fairness in Serving Large Language
Models", arXiv:2401.00588): a computed prompt row counts 1, a generated token 2. Who has been away starts at the level
of those who wait, so that no tenant saves up a claim and none pays for times when nobody else wanted anything. A
request that was preempted has paid for its turn and comes before all new ones of its priority.

Priorities do not starve anybody: after `RESERVED` admissions that passed somebody of a lower priority, the one whose
turn it would be without priorities is raised to the highest.
"""

from bisect import insort
from collections.abc import Iterator

from .sequence import Sequence

RESERVED = 8
_GENERATED_COST = 2
_REMEMBERED = 4096


class FairQueue:
    """Waiting sequences, for one thread. Iterated by arrival; `in_turn` gives the order of service."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []
        self._served: dict[str, int] = {}
        self._last = ""  # the tenant that left the queue last
        self._passed = 0
        self._changes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._waiting))

    @property
    def first(self) -> Sequence:
        """Whose turn it is."""
        return min(self._waiting, key=self._turn)

    @property
    def priority(self) -> int:
        """The highest that waits."""
        return max(sequence.priority for sequence in self._waiting)

    def in_turn(self) -> Iterator[Sequence]:
        """Everybody, in the order of service; what is taken and charged meanwhile counts for the rest of it."""
        left = sorted(self._waiting, key=self._turn, reverse=True)
        changes = self._changes
        while left:
            yield left.pop()
            if changes != self._changes:
                left.sort(key=self._turn, reverse=True)
                changes = self._changes

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.request.namespace
        if all(other.request.namespace != tenant for other in self._waiting):
            self._lift(tenant)
        insort(self._waiting, sequence, key=lambda other: other.order)
        self._changes += 1

    def remove(self, sequence: Sequence) -> None:
        """Take out somebody who is not admitted."""
        self._waiting.remove(sequence)
        self._last = sequence.request.namespace
        self._changes += 1

    def take(self, sequence: Sequence) -> None:
        """Take out somebody who is admitted."""
        self.remove(sequence)
        passes = any(other.priority < sequence.priority for other in self._waiting)
        self._passed = self._passed + 1 if passes else 0
        if self._passed >= RESERVED:
            self._passed = 0
            self._raise(max(sequence.priority, self.priority))

    def charge(self, sequence: Sequence) -> None:
        """Count what an admitted sequence was given since the last time: its planned rows at first, then its tokens."""
        generated = sequence.length - sequence.charged
        cost = _GENERATED_COST * generated if sequence.charged else len(sequence.plan)
        sequence.charged = sequence.length
        tenant = sequence.request.namespace
        self._served[tenant] = self._served.get(tenant, 0) + cost
        self._changes += 1

    def _turn(self, sequence: Sequence) -> tuple[int, bool, int, int]:
        served = self._served.get(sequence.request.namespace, 0)
        return -sequence.priority, sequence.admitted is None, served, sequence.order

    def _lift(self, tenant: str) -> None:
        waiting = {other.request.namespace for other in self._waiting} or {self._last}
        least = min(self._served.get(other, 0) for other in waiting)
        if len(self._served) > _REMEMBERED:  # who is not above the least would be lifted to it anyway
            self._served = {name: served for name, served in self._served.items() if served > least or name in waiting}
        self._served[tenant] = max(self._served.get(tenant, 0), least)

    def _raise(self, priority: int) -> None:
        lower = [sequence for sequence in self._waiting if sequence.priority < priority]
        chosen = min(lower, key=lambda sequence: self._turn(sequence)[1:])
        chosen.raised += priority - chosen.priority
