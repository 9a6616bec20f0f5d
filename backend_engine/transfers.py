"""Small values between host and device, in both directions without waiting for what the device is busy with."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(values: Sequence[object], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, or equally long sequences of numbers, as a tensor on the device."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def carried(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array of any size on the device. What is not in pinned memory waits for the stream from 64 KB on."""
    host = torch.from_numpy(array)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class Fetch:
    """Tensors on their way to the host, behind all that was launched before this was made, and before what comes."""

    def __init__(self, *tensors: Tensor) -> None:
        # On a GPU torch takes pinned memory for copies that do not block.
        self._copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        self._done: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> tuple[Tensor, ...]:
        """The tensors on the host; waits for them alone."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies
