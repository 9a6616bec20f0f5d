"""What an engine does when the device has no memory for a step: smaller steps, then fewer requests, and slowly back."""

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
        self.times = 0  # that memory ran out
        self._failures = 0  # in a row
        self._since = 0

    def shrink(self, *, rows: int, running: int) -> bool:
        """Memory ran out in a step of `rows` prefill rows, with `running` requests; False if it is no use to go on.

        A step that cannot be smaller is tried a few times: memory may come back.
        """
        self.times += 1
        self._failures += 1
        self._since = 0
        if rows > _LEAST_ROWS:
            self.rows = max(_LEAST_ROWS, min(self.rows, rows) // 2)
        elif running > 1:
            self.running = max(1, min(self.running, running) // 2)
        else:
            return self._failures < _TRIES
        return True

    def ran(self) -> None:
        """A step has run; after many in a row the limits grow again."""
        self._failures = 0
        if (self.rows, self.running) == self._options:
            return
        self._since += 1
        if self._since >= _STEPS_UNTIL_MORE:
            self._since = 0
            self.rows, self.running = min(2 * self.rows, self._options[0]), min(2 * self.running, self._options[1])


def release_memory(device: torch.device) -> None:
    """Give what torch keeps for later back to the device, so that it can be had in other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
