"""A CUDA stream for copies beside the engine's steps. See streams.SideStream."""

from collections.abc import Callable

import torch

from .streams import Mark


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._device = stream.device

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()

    @property
    def reached(self) -> bool:
        return self._event.query()


class CudaStream:
    """Copies between the pool and pinned memory are the work of the card's copy engines, not of its kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        return _CudaMark(self._stream)
