"""What an engine does when the device has no memory for a step: no guesses, smaller steps, fewer requests.

Slowly it goes back.
"""

import torch

_LEAST_ROWS = 16
_TRIES = 3
_STEPS_UNTIL_MORE = 256


class Relief:
    """The limits of a step in force: at first those of the options. Halved by `shrink`, doubled after many steps."""

    def __init__(self, *, rows: int, running: int) -> None:
        self._options = rows, running
        self.rows = rows
        self.running = running
        self.guessing = True  # whether steps may have rows for guesses
        self.times = 0  # that memory ran out
        self.failures = 0  # of steps that cannot be smaller, since anybody came further
        self._since = 0

    def shrink(self, *, rows: int, running: int, guessed: bool = False) -> bool:
        """Memory ran out in a step of `rows` prefill rows, with `running` requests; False if it is no use to go on.

        A step that cannot be smaller is tried a few times: memory may come back.
        """
        self.times += 1
        self._since = 0
        if guessed:
            self.guessing = False
        elif rows > _LEAST_ROWS:
            self.rows = max(_LEAST_ROWS, min(self.rows, rows) // 2)
        elif running > 1:
            self.running = max(1, min(self.running, running) // 2)
        else:
            self.failures += 1
            return self.failures < _TRIES
        return True

    def ran(self, *, further: bool = True) -> None:
        """A step has run, and somebody is `further` than before memory ran out; the limits grow after many steps."""
        if further:
            self.failures = 0
        if self.guessing and (self.rows, self.running) == self._options:
            return
        self._since += 1
        if self._since >= _STEPS_UNTIL_MORE:
            self._since = 0
            self.guessing = True
            self.rows, self.running = min(2 * self.rows, self._options[0]), min(2 * self.running, self._options[1])


def release_memory(device: torch.device) -> None:
    """Give what torch keeps for later back to the device, so that it can be had in other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
