"""Recording work as a CUDA graph beside a server's other threads."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from .options import LEAST_GRAPH_ROWS, MOST_GRAPH_ROWS

# Rows of the steps with prefills that are recorded. Between two of them, a step is padded.
SIZES = (LEAST_GRAPH_ROWS, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, MOST_GRAPH_ROWS)

_WARM_UPS = 2

R = TypeVar("R")


class Record(Protocol):
    """Records work once, as something that runs it again and again and returns what it returned."""

    def __call__(self, work: Callable[[], R]) -> Callable[[], R]: ...


class Recorder:
    """Records work as graphs that share their memory: no two of them may run at the same time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
        """The work as a graph, and its result, whose memory is the graph's and stays."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (an embedder, the moving of chunks) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = work()
        return graph, result


def cuda_record() -> Record:
    """Records CUDA graphs: what they return is memory that the next run overwrites. See Recorder."""
    recorder = Recorder()

    def record(work: Callable[[], R]) -> Callable[[], R]:
        graph, result = recorder(work)

        def replay() -> R:
            graph.replay()
            return result

        return replay

    return record


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected inside: an engine of before whose graphs end while this thread captures would end the
    capture, and with it this engine's start."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
