"""How fast something goes, by what was measured lately."""

_DECAY = 0.7  # weight of all earlier measurements, each time a new one comes


class Rate:
    """Amount per second over the last few measurements."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = _DECAY * self._amount + amount
        self._seconds = _DECAY * self._seconds + seconds

    def fade(self) -> None:
        """Believe a little less that it is slow: what is avoided because it was slow is otherwise never tried again."""
        self._seconds *= 0.95

    def seconds(self, amount: float) -> float | None:
        """How long `amount` takes; None before the first measurement."""
        return amount * self._seconds / self._amount if self._amount else None
