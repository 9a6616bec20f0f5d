"""Reused spans on their way into the pool: copied and turned, layer after layer while earlier layers compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .fused import FusedOps, fused_ops
from .model import Decoder
from .pool import KVPool
from .rope import LayerRopes
from .span_rows import SpanRows
from .tiers.base import Loads
from .tiers.empty import NO_LOADS
from .tiers.open import side_stream
from .tiers.streams import Mark, SideStream
from .types import KVBlock, ReusedSpan

# Layers that are begun before the one that is waited for: enough that the copies never wait for the host.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class _Promised:
    """Spans of one request, where they go, and whether anybody still wants them."""

    spans: tuple[ReusedSpan, ...]
    slots: Tensor
    wanted: Callable[[], bool]


class SpanLoader:
    """Brings spans into `pool`. For the engine's thread.

    On `stream` one kernel a layer reads the rows from wherever they are and turns them, just before a step gets to that
    layer: reading pinned memory takes about as long as computing the few rows that are recomputed.
    """

    def __init__(self, pool: KVPool, ropes: LayerRopes, ops: FusedOps, stream: SideStream) -> None:
        self._pool = pool
        self._ropes = ropes
        self._ops = ops
        self._stream = stream
        self._promised: list[_Promised] = []
        self._reading: list[_SpanLoads] = []

    def add(self, spans: tuple[ReusedSpan, ...], slots: Tensor, *, wanted: Callable[[], bool]) -> None:
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
        spans, slots = [span for one in promised for span in one.spans], torch.cat([one.slots for one in promised])
        loads = _SpanLoads(spans, slots, self._pool, self._ropes, self._ops, self._stream)
        self._promised = []  # not before: without memory for copies a step fails, not who was admitted beside it
        self._reading.append(loads)  # kernels read memory that nobody else may hold any more
        return loads


class _SpanLoads:
    """See tiers.base.Loads."""

    def __init__(
        self,
        spans: Sequence[ReusedSpan],
        slots: Tensor,
        pool: KVPool,
        ropes: LayerRopes,
        ops: FusedOps,
        stream: SideStream,
    ) -> None:
        self._slots = slots
        self._pool = pool
        self._ops = ops
        self._stream = stream
        self._marks: list[Mark] = []
        self._rows = SpanRows.readable((span.kv for span in spans), device=slots.device, dtype=pool.wide)
        old = torch.cat([_places(span.start if span.position is None else span.position, span) for span in spans])
        new = torch.cat([_places(span.start, span) for span in spans])
        self._turns = ropes.turns(old.to(slots.device), new.to(slots.device))
        stream.follow()  # the slots were others', whose steps may still run

    @property
    def ended(self) -> bool:
        """Whether nothing is read any more."""
        return len(self._marks) == len(self._turns) and self._marks[-1].reached

    def wait(self, layer: int) -> None:
        self._begin(layer + 1 + _AHEAD)
        self._marks[layer].hold()

    def begin(self) -> None:
        self._begin(len(self._turns))

    def settle(self) -> None:
        self.begin()
        self._marks[-1].hold()

    def _begin(self, layers: int) -> None:
        for layer in range(len(self._marks), min(layers, len(self._turns))):
            self._stream.run(lambda layer=layer: self._bring(layer))
            self._marks.append(self._stream.mark())

    def _bring(self, layer: int) -> None:
        self._ops.placed(self._rows, layer, self._turns[layer], self._slots, self._pool.layer(layer))


class SpanWriter:
    """Writes spans at once: for a CPU, where copies and steps are one thread's. See SpanLoader."""

    def __init__(self, pool: KVPool, ropes: LayerRopes) -> None:
        self._pool = pool
        self._ropes = ropes

    def add(self, spans: tuple[ReusedSpan, ...], slots: Tensor, *, wanted: Callable[[], bool]) -> None:
        at = 0
        for span in spans:
            self._pool.write_block(slots[at : at + span.kv.tokens], self._turned(span))
            at += span.kv.tokens

    def loads(self) -> Loads:
        return NO_LOADS

    def _turned(self, span: ReusedSpan) -> KVBlock:
        if span.position in (None, span.start):
            return span.kv
        k = span.kv.k.to(self._ropes.device)
        moved = self._ropes.move(
            k.float(), _places(span.position, span).to(k.device), _places(span.start, span).to(k.device)
        )
        return KVBlock(moved.to(k.dtype), span.kv.v)


class Together:
    """Several loads as one. See tiers.base.Loads."""

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


def _places(first: int, span: ReusedSpan) -> Tensor:
    return torch.arange(first, first + span.kv.tokens)
