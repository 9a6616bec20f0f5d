"""Steps in which every request runs one row, as a contract: launched, read later, and launched again on the device."""

from typing import Protocol

from torch import Tensor


class Launched(Protocol):
    """A step that runs or has run. `logits` [requests, vocab] are valid until the next launch."""

    @property
    def logits(self) -> Tensor: ...

    def greedy(self) -> list[int]:
        """The likeliest id of each request; waits for the step. Must be read before the launch after the next."""
        ...


class SingleRowSteps(Protocol):
    """Decodes one token a request. Page tables are read where the engine's running table mirrors them."""

    def run(self, ids: Tensor, places: Tensor, rows: Tensor) -> Launched:
        """Launch a step; ids, places in key order and table rows of the requests are int64 [requests] on the host."""
        ...

    def again(self, last: Launched) -> Launched:
        """Launch the next step of the same requests, each with its likeliest token of `last`, the newest launch."""
        ...
