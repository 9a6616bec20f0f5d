"""Runs prompts with stored chunks on the decoder itself, several ways at a time. Used by blend_quality.py.

The answer is part of the prompt (teacher forcing), so that one forward scores it; then the prompt's own continuation is
decoded greedily for all ways together, over the answer's slots.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from blend_cases import Case
    from promptsluice.backend_engine import KVBlock, LoadedModel
    from promptsluice.backend_engine.batch import RequestRows
    from promptsluice.backend_engine.probe import Probe
    from promptsluice.kv_reuse import Repair
    from promptsluice.kv_reuse.rounding import ChunkDtype

Window = tuple[float, float]
Looks = dict[tuple[str, Window, float], Tensor]

PAGE = 16


@dataclass(frozen=True)
class Way:
    """How a prompt is computed: chunks after `anchor` (None: no chunks at all), and which share of them is repaired.

    `looks` 2: half of the rows are chosen and run, then the question looks again, at what they have become.
    """

    anchor: str | None
    method: str = "reuse"
    ratio: float = 0.0
    looks: int = 1


@dataclass(frozen=True)
class Outcome:
    """`logprobs` float32 [answer tokens, vocab] of what follows the prompt and each answer token; `greedy` ids."""

    logprobs: Tensor
    greedy: list[int]


class Bench:
    """A pool that has room for `together` prompts of `tokens` tokens."""

    def __init__(self, model: "LoadedModel", *, together: int, tokens: int) -> None:
        from promptsluice.backend_engine.pool import KVPool

        self.model, self.decoder, self.device = model, model.decoder, model.decoder.device
        self.together, self.width = together, -(-tokens // PAGE)
        self._anchors: dict[tuple[int, ...], KVBlock] = {}
        self.pool = KVPool(
            model.spec, pages=together * self.width, page_size=PAGE, dtype=self.decoder.dtype, device=self.device
        )

    def chunks(self, case: "Case", anchor: str, *, dtype: "ChunkDtype" = "model") -> list["KVBlock"]:
        """Each passage's KV after the anchor, kept in `dtype`, then moved to its place in the prompt."""
        from promptsluice.kv_reuse import repositioned
        from promptsluice.kv_reuse.rounding import kept

        blocks = []
        for first in range(0, len(case.spans), self.together):
            spans = case.spans[first : first + self.together]
            anchors = case.anchors[anchor][first : first + self.together]
            known = [self._anchor(before) if before else None for before in anchors]  # all first: it uses the pool
            parts = []
            for number, ((start, length), before) in enumerate(zip(spans, anchors, strict=True)):
                if (kv := known[number]) is not None:
                    self.pool.write_block(self._slots(number, 0, len(before)), kv)
                places = range(len(before), len(before) + length)
                parts.append(self._part(number, case.ids[start : start + length], places))
            self._forward(parts)
            for number, ((start, length), before) in enumerate(zip(spans, anchors, strict=True)):
                kv = self.pool.read(self._slots(number, len(before), len(before) + length))
                if dtype != "model":
                    kv = kept(kv, dtype).widened().mapped(lambda part: part.to(self.decoder.device))
                blocks.append(repositioned(kv, self.decoder.ropes, old=len(before), new=start))
        return blocks

    def _anchor(self, ids: tuple[int, ...]) -> "KVBlock":
        if ids not in self._anchors:
            self._forward([self._part(0, ids, range(len(ids)))])
            self._anchors[ids] = self.pool.read(self._slots(0, 0, len(ids)))
        return self._anchors[ids]

    def attention(
        self, case: "Case", blocks: Sequence["KVBlock"], *, window: Window, rerun: Collection[int] = ()
    ) -> Tensor:
        """What the engine's probe would measure: float32, one for each row of the chunks. `window`: a chooser's `depth`
        and `until`. `rerun` are places of rows that are recomputed with it."""
        from promptsluice.backend_engine.probe import PROBING_ROWS, Probe

        asked, total, inside = sum(case.spans[-1]), len(case.ids), set(case.places).difference(rerun)
        needed = [place for place in range(total) if place not in inside]
        self._load(0, case, blocks)
        asking = [row for row, place in enumerate(needed) if place >= max(asked, total - PROBING_ROWS)]
        probe = Probe(
            rows=torch.tensor(asking, device=self.device),
            slots=self._slots(0, 0, asked),
            depth=window[0],
            until=window[1],
            attention=torch.zeros(asked, device=self.device),
        )
        self._forward([self._part(0, [case.ids[place] for place in needed], needed)], probes=(probe,))
        return probe.attention[torch.tensor(case.places, device=self.device)]

    def run(
        self, case: "Case", ways: Sequence[tuple[Way, "Repair"]], chunks: dict[str, list["KVBlock"]], *, tokens: int
    ) -> list[Outcome]:
        """The outcome of each way; `tokens` are decoded."""
        looks: Looks = {}
        for way, repair in ways:
            window = _window(repair)
            if way.anchor is None or window is None:
                continue
            if (way.anchor, window, 0.0) not in looks:
                looks[way.anchor, window, 0.0] = self.attention(case, chunks[way.anchor], window=window)
            if way.looks == 2 and (way.anchor, window, way.ratio) not in looks:
                first = self._chosen(case, replace(way, ratio=way.ratio / 2, looks=1), repair, looks)
                seen = self.attention(case, chunks[way.anchor], window=window, rerun=first)
                seen[[place in first for place in case.places]] = math.inf
                looks[way.anchor, window, way.ratio] = seen
        outcomes: list[Outcome] = []
        for first in range(0, len(ways), self.together):
            outcomes += self._run(case, ways[first : first + self.together], chunks, looks, tokens)
        return outcomes

    def _run(
        self,
        case: "Case",
        ways: Sequence[tuple[Way, "Repair"]],
        chunks: dict[str, list["KVBlock"]],
        looks: Looks,
        tokens: int,
    ) -> list[Outcome]:
        ids = (*case.ids, *case.answer[:-1])
        parts = []
        for number, (way, repair) in enumerate(ways):
            if way.anchor is None:
                parts.append(self._part(number, ids, range(len(ids)), scored=len(case.answer)))
                continue
            self._load(number, case, chunks[way.anchor])
            parts.append(self._repaired(number, case, way, repair, looks))
        hidden = self._forward(parts)
        logprobs = self.decoder.logits(hidden).log_softmax(-1).unflatten(0, (len(parts), -1))
        following = logprobs[:, 0].argmax(-1)
        greedy = [following]
        for place in range(len(case.ids), len(case.ids) + tokens - 1):
            rows = [self._part(number, [token], [place], scored=1) for number, token in enumerate(following.tolist())]
            following = self.decoder.logits(self._forward(rows)).argmax(-1)
            greedy.append(following)
        columns = torch.stack(greedy, 1).tolist()
        return [Outcome(row, column) for row, column in zip(logprobs, columns, strict=True)]

    def _repaired(self, number: int, case: "Case", way: Way, repair: "Repair", looks: Looks) -> "RequestRows":
        ids, places = (*case.ids, *case.answer[:-1]), case.places
        quota = math.ceil(way.ratio * len(places) - 1e-9)
        inside = set(places)
        if repair.selector is not None and 0 < quota < len(places):
            part = self._part(number, ids, range(len(ids)), scored=len(case.answer))
            repairable = [place in inside for place in range(len(ids))]
            return replace(part, selector=repair.selector, repairable=repairable, quota=quota)
        chosen = self._chosen(case, way, repair, looks)
        indices = [place for place in range(len(ids)) if place not in inside or place in chosen]
        return self._part(number, [ids[place] for place in indices], indices, scored=len(case.answer))

    def _chosen(self, case: "Case", way: Way, repair: "Repair", looks: Looks) -> set[int]:
        """Places of the rows that a chooser names."""
        quota = math.ceil(way.ratio * len(case.places) - 1e-9)
        if repair.chooser is None or not quota:
            return set()
        assert way.anchor is not None, "only chunks are repaired"
        window = _window(repair)
        attention = None if window is None else looks[way.anchor, window, way.ratio if way.looks == 2 else 0.0]
        rows = repair.chooser.choose(attention=attention, offsets=torch.tensor(case.offsets), quota=quota)
        return {case.places[row] for row in rows.tolist()}

    def _part(self, number: int, ids: Sequence[int], indices: Sequence[int], *, scored: int = 0) -> "RequestRows":
        from promptsluice.backend_engine.batch import RequestRows

        pages = range(number * self.width, (number + 1) * self.width)
        return RequestRows(ids=ids, indices=indices, pages=pages, logits=range(len(ids) - scored, len(ids)))

    def _load(self, number: int, case: "Case", blocks: Sequence["KVBlock"]) -> None:
        for (start, length), block in zip(case.spans, blocks, strict=True):
            self.pool.write_block(self._slots(number, start, start + length), block)

    def _slots(self, number: int, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self.device) + number * self.width * PAGE

    def _forward(self, parts: Sequence["RequestRows"], *, probes: "tuple[Probe, ...]" = ()) -> Tensor:
        from promptsluice.backend_engine.batch import build_batch

        batch = build_batch(parts, page_size=PAGE, device=self.device)
        return self.decoder.forward(replace(batch, probes=probes), self.pool).hidden


def _window(repair: "Repair") -> Window | None:
    """The part of the depth in which a chooser has the question looked at."""
    chooser = repair.chooser
    return None if chooser is None or chooser.depth is None else (chooser.depth, chooser.until)
