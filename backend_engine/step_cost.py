"""What a step costs by its number of rows, measured once: on a CPU on a part of the model that stands for the whole."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import RequestRows, build_batch
from .likeliest import likeliest
from .model import Decoder
from .pool import KVPool
from .steps import Draw, MixedSteps, SingleRowSteps

ROWS = (1, 2, 4, 8, 16, 32, 64)
_ROUNDS = 3
_CHAINED = 8  # steps launched one behind another, as decodes are


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """`seconds[i]` for steps of `rows[i]` rows, both ascending and from one row on.

    Where only a part of the model is measured, their ratios alone mean anything.

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

    def of(self, rows: int) -> float:
        """Seconds of one step with `rows` rows."""
        return self.at(np.array([rows])).item()


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
    clock = time.process_time if part.device.type == "cpu" else time.perf_counter
    return StepCost(rows=tuple(rows), seconds=_timed(step, rows, clock))


def measured_singles(steps: SingleRowSteps, *, spare: int, most: int) -> StepCost:
    """Time steps of up to `most` requests of one row each, every one launched before the last one's tokens are read.

    They run on the table row `spare`, which is nobody's.
    """

    def step(count: int) -> None:
        zeros, owners = torch.zeros(count, dtype=torch.int64), torch.full((count,), spare)
        launched = steps.run(zeros, zeros, owners, draw=Draw.LIKELIEST)
        for _ in range(_CHAINED - 1):
            launched = steps.again(launched)
        launched.ids()

    rows = tuple(count for count in ROWS if count <= most)
    return StepCost(rows=rows, seconds=tuple(seconds / _CHAINED for seconds in _timed(step, rows, time.perf_counter)))


def measured_mixed(decoder: Decoder, steps: MixedSteps, *, spare: int, most: int) -> StepCost:
    """Time steps that verify guesses, with up to `most` rows, till the host has their tokens; as stairs.

    They run at the first place of the table row `spare`, which is nobody's.
    """

    def step(count: int) -> None:
        zeros = np.zeros(count, dtype=np.int64)
        hidden = steps.run(zeros, zeros, np.array([spare]), np.array([count]))
        likeliest(decoder.logits(hidden)).tolist()

    *smaller, largest = steps.sizes
    sizes = [*(size for size in smaller if size < most), min(largest, most)]
    timed = _timed(step, sizes, time.perf_counter)
    stairs: dict[int, float] = {}
    for first, size, seconds in zip((1, *(size + 1 for size in sizes)), sizes, timed, strict=False):
        stairs[first] = stairs[size] = seconds
    return StepCost(rows=tuple(stairs), seconds=tuple(stairs.values()))


def _timed(step: Callable[[int], None], rows: Sequence[int], clock: Callable[[], float]) -> tuple[float, ...]:
    """The shortest of three for each, in seconds. Noise only adds: a step takes no longer than one of more rows."""
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(_ROUNDS):
        for count in rows:
            started = clock()
            step(count)
            best[count] = min(best[count], clock() - started)
    seconds = np.minimum.accumulate([best[count] for count in reversed(rows)])[::-1]
    return tuple(seconds.tolist())


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
