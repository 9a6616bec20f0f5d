"""Where memory tiers keep chunks: on the host, page-locked where a GPU copies from there, or on a device."""

from abc import ABC, abstractmethod

import torch

from ..backend_engine.rounded_kv import Block


class Place(ABC):
    """A kind of memory. For any thread."""

    @abstractmethod
    def held(self, kv: Block) -> Block:
        """The same KV in this memory, on its own where it was not there before; it has arrived when this returns."""

    def nbytes(self, kv: Block) -> int:
        """How many bytes it takes here."""
        return kv.nbytes


class Host(Place):
    """The host's memory; what is there already is shared."""

    def held(self, kv: Block) -> Block:
        return kv.mapped(lambda part: part.to("cpu"))


class Pinned(Place):
    """Page-locked host memory, from which a GPU copies on its own; each tensor takes the next power of two of bytes."""

    def held(self, kv: Block) -> Block:
        return kv.mapped(lambda part: part.to("cpu").contiguous().pin_memory())

    def nbytes(self, kv: Block) -> int:
        return sum(1 << (part.nbytes - 1).bit_length() for part in kv.tensors if part.nbytes)


class OnDevice(Place):
    """A device's memory. Any stream may read what is there: the copies have ended."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def held(self, kv: Block) -> Block:
        placed = kv.mapped(lambda part: part.to(self._device))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return placed
