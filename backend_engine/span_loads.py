"""Reused spans on their way into the pool: copied and turned, layer after layer while earlier layers compute."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .fused import FusedOps, fused_ops
from .model import Decoder
from .pool import KVPool
from .rope import LayerRopes
from .rounded_kv import RoundedBlock
from .sequence import Rows
from .span_rows import SpanRows
from .tiers.base import Loads
from .tiers.empty import NO_LOADS
from .tiers.open import side_stream
from .tiers.streams import Mark, SideStream
from .transfers import carried
from .types import KVBlock, ReusedSpan

# At most so many layers are read by one kernel: a launch takes the host a good part of what a layer of a few rows takes
# the device.
_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class _Promised:
    """Spans of one request, where they go, and whether anybody still wants them."""

    spans: tuple[ReusedSpan, ...]
    slots: Rows
    wanted: Callable[[], bool]


class SpanLoader:
    """Brings spans into `pool`. For the engine's thread.

    On `stream` kernels read the rows from wherever they are and turn them, a few layers at a time, beside the step that
    waits for them: reading pinned memory takes about as long as computing the few rows that are recomputed.
    """

    def __init__(self, pool: KVPool, ropes: LayerRopes, ops: FusedOps, stream: SideStream) -> None:
        self._pool = pool
        self._ropes = ropes
        self._ops = ops
        self._stream = stream
        self._promised: list[_Promised] = []
        self._reading: list[_SpanLoads] = []

    def add(self, spans: tuple[ReusedSpan, ...], slots: Rows, *, wanted: Callable[[], bool]) -> None:
        """Promise `spans` to the `slots` [tokens of all spans] int64, for whoever waits for the next `loads`.

        They are not brought if nothing is `wanted` any more by then: the slots may be others'.
        """
        self._promised.append(_Promised(spans, slots, wanted))

    def loads(self) -> Loads:
        """All that was promised since the last call."""
        self._reading = [one for one in self._reading if not one.ended]
        promised = self._promised = [one for one in self._promised if one.wanted()]
        if not promised:
            return NO_LOADS
        groups = [
            _Group.of(spans, slots, self._pool, self._ropes)
            for spans, slots in _by_kind(
                [span for one in promised for span in one.spans], np.concatenate([one.slots for one in promised])
            )
        ]
        again = partial(self._promise_again, promised)
        loads = _SpanLoads(groups, self._pool, self._ops, self._stream, self._ropes, again=again)
        self._promised = []  # not before: without memory for copies a step fails, not who was admitted beside it
        self._reading.append(loads)  # kernels read memory that nobody else may hold any more
        return loads

    def _promise_again(self, promised: Sequence[_Promised]) -> None:
        self._promised = [*promised, *self._promised]


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans of one kind: where their rows are read, how each layer's keys are turned, and where they go."""

    rows: SpanRows
    turns: tuple[tuple[Tensor, Tensor], ...]
    slots: Tensor

    @classmethod
    def of(cls, spans: Sequence[ReusedSpan], slots: Rows, pool: KVPool, ropes: LayerRopes) -> "_Group":
        device = pool.data.device
        old = np.concatenate([_places(span.start if span.position is None else span.position, span) for span in spans])
        new = np.concatenate([_places(span.start, span) for span in spans])
        before, after, there = carried(np.stack((old, new, slots)).astype(np.int32), device)
        rows = SpanRows.readable([span.kv for span in spans], device=device, dtype=pool.wide)
        return cls(rows, ropes.turns(before, after), there)


class _SpanLoads:
    """See tiers.base.Loads. Where a layer cannot be begun, all of it is promised `again`, to whoever still wants it."""

    def __init__(
        self,
        groups: Sequence[_Group],
        pool: KVPool,
        ops: FusedOps,
        stream: SideStream,
        ropes: LayerRopes,
        *,
        again: Callable[[], None],
    ) -> None:
        self._groups = groups
        self._pool = pool
        self._ops = ops
        self._stream = stream
        self._again = again
        self._ends = deque(_ends(ropes))  # of what is still to begin
        self._marks: list[Mark] = []  # of each layer that is begun
        stream.follow()  # the slots were others', whose steps may still run, and the groups' tables are on their way

    @property
    def ended(self) -> bool:
        """Whether nothing is read any more."""
        return not self._ends and self._marks[-1].reached

    def wait(self, layer: int) -> None:
        self.begin()
        self._marks[layer].hold()

    def begin(self) -> None:
        try:
            while self._ends:
                together = range(len(self._marks), self._ends[0])
                self._stream.run(lambda together=together: self._bring(together))
                self._marks += [self._stream.mark()] * len(together)
                self._ends.popleft()
        except BaseException:
            self._give_up()
            raise

    def settle(self) -> None:
        self.begin()
        self._marks[-1].hold()

    def _give_up(self) -> None:
        """The step fails; what is under way comes before anybody else writes, and the rest never."""
        self._ends.clear()
        self._again()
        self._marks.append(self._stream.mark())
        self._marks[-1].hold()

    def _bring(self, layers: range) -> None:
        pools = [self._pool.layer(layer) for layer in layers]
        for group in self._groups:
            self._ops.placed(group.rows, layers, group.turns[layers[0]], group.slots, pools)


class SpanWriter:
    """Writes spans at once: for a CPU, where copies and steps are one thread's. See SpanLoader."""

    def __init__(self, pool: KVPool, ropes: LayerRopes) -> None:
        self._pool = pool
        self._ropes = ropes

    def add(self, spans: tuple[ReusedSpan, ...], slots: Rows, *, wanted: Callable[[], bool]) -> None:
        there = torch.from_numpy(slots).to(self._ropes.device)
        for span, places in zip(spans, there.split([span.kv.tokens for span in spans]), strict=True):
            self._pool.write_block(places, self._turned(span))

    def loads(self) -> Loads:
        return NO_LOADS

    def _turned(self, span: ReusedSpan) -> KVBlock:
        block = span.kv.widened()
        if span.position is None or span.position == span.start:
            return block
        k = block.k.to(self._ropes.device)
        old, new = (torch.from_numpy(_places(first, span)).to(k.device) for first in (span.position, span.start))
        return KVBlock(self._ropes.move(k.float(), old, new).to(k.dtype), block.v)


def together(*loads: Loads) -> Loads:
    """Several loads as one; NO_LOADS if none of them has any."""
    some = [one for one in loads if one is not NO_LOADS] or [NO_LOADS]
    return some[0] if len(some) == 1 else _Together(*some)


class _Together:
    """See tiers.base.Loads."""

    def __init__(self, *loads: Loads) -> None:
        self._loads = loads

    def wait(self, layer: int) -> None:
        for loads in self._loads:
            loads.wait(layer)

    def begin(self) -> None:
        for loads in self._loads:
            loads.begin()

    def settle(self) -> None:
        for loads in self._loads:
            loads.settle()


def span_loader(decoder: Decoder, pool: KVPool, stream: SideStream | None) -> SpanLoader | SpanWriter:
    """What brings spans into a decoder's pool: on `stream`, by default one of its own on a GPU and none on a CPU."""
    if stream is None and decoder.device.type != "cuda":
        return SpanWriter(pool, decoder.ropes)
    return SpanLoader(pool, decoder.ropes, fused_ops(decoder.device), stream or side_stream(decoder.device))


def _places(first: int, span: ReusedSpan) -> Rows:
    return np.arange(first, first + span.kv.tokens)


def _ends(ropes: LayerRopes) -> list[int]:
    """Where the layers that one kernel reads end: few at first and at last, which are waited for, and all of one
    rope."""
    layers, ends, at = len(ropes.specs), [], 0
    while at < layers:
        most = min(_TOGETHER, max(1, at), max(1, (layers - at) // 2))
        start, at = at, at + 1
        while at < start + most and ropes.specs[at] == ropes.specs[start]:
            at += 1
        ends.append(at)
    return ends


def _by_kind(spans: Sequence[ReusedSpan], slots: Rows) -> list[tuple[list[ReusedSpan], Rows]]:
    """The spans, and their parts of `slots`, apart by what one kernel cannot read together."""
    ends = np.cumsum([0, *(span.kv.tokens for span in spans)]).tolist()
    kinds: dict[torch.dtype | None, list[tuple[ReusedSpan, Rows]]] = {}
    for span, (start, stop) in zip(spans, pairwise(ends), strict=True):
        rounded = span.kv.k.dtype if isinstance(span.kv, RoundedBlock) else None
        kinds.setdefault(rounded, []).append((span, slots[start:stop]))
    return [([span for span, _ in kind], np.concatenate([part for _, part in kind])) for kind in kinds.values()]
