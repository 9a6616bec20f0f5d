"""What a step costs by its number of rows: measured once, on a part of the model that stands for the whole."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import RequestRows, build_batch
from .model import Decoder
from .pool import KVPool
from .steps import Draw, SingleRowSteps

ROWS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """`seconds[i]` for steps of `rows[i]` rows, both ascending and from one row on. Only their ratios mean anything.

    Between two points it is linear; beyond the last one a step is bound by its products, and costs as many rows as it
    has.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.rows) == len(self.seconds) > 0 and self.rows[0] == 1, self.rows
        assert (np.diff(self.rows) > 0).all() and (np.diff(self.seconds) >= 0).all() and self.seconds[0] > 0, self

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of steps with `rows` rows each."""
        return np.interp(rows, self.rows, self.seconds) * np.maximum(1, rows / self.rows[-1])


@torch.inference_mode()
def measured(decoder: Decoder, *, rows: Sequence[int] = ROWS) -> StepCost:
    """Time steps of decoding on as many layers as weigh what the output matrix does."""
    part = _part(decoder)
    most = rows[-1]
    pool = KVPool(part.spec, pages=1, page_size=most, dtype=part.dtype, device=part.device)

    def step(count: int) -> None:
        numbers = range(count)
        request = RequestRows(ids=[0] * count, indices=numbers, pages=[0], logits=numbers)
        batch = build_batch([request], page_size=most, device=part.device)
        part.logits(part.forward(batch, pool).hidden).argmax(-1).tolist()

    # On a CPU its own time is what counts: others on the machine only stretch the wall's.
    return _timed(step, rows, time.process_time if part.device.type == "cpu" else time.perf_counter)


def measured_steps(steps: SingleRowSteps, *, spare: int) -> StepCost:
    """Time whole steps as they run later, on the table row `spare`, which is nobody's."""
    requests, width = steps.drafting

    def step(count: int) -> None:
        zeros, owners = torch.zeros(count, dtype=torch.int64), torch.full((count,), spare)
        if count == 1:
            steps.run(zeros, zeros, owners, draw=Draw.LIKELIEST).ids()
            return
        widths = [min(count, width)] * max(1, count // width)
        steps.drafted(zeros, zeros, owners, widths).argmax(-1).tolist()

    return _timed(
        step, [1, *(count for count in (4, 8, 16, 32, 64, 128) if count <= requests * width)], time.perf_counter
    )


def _timed(step: Callable[[int], None], rows: Sequence[int], clock: Callable[[], float]) -> StepCost:
    """The shortest of three for each. Noise only adds: a step takes no longer than one of more rows."""
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(_ROUNDS):
        for count in rows:
            started = clock()
            step(count)
            best[count] = min(best[count], clock() - started)
    seconds = np.minimum.accumulate([best[count] for count in reversed(rows)])[::-1]
    return StepCost(rows=tuple(rows), seconds=tuple(seconds.tolist()))


def _part(decoder: Decoder) -> Decoder:
    weights, spec = decoder.weights, decoder.spec
    layer = weights.layers[0]
    weight = layer.qkv.nbytes + layer.out.nbytes + layer.gate_up.nbytes + layer.down.nbytes
    layers = min(spec.layers, -(-weights.head.nbytes // weight))
    return Decoder(
        replace(spec, layers=layers, ropes=spec.ropes[:layers], windows=spec.windows[:layers]),
        replace(weights, layers=weights.layers[:layers]),
        attention=decoder.attention,
        library=decoder.library,
    )
