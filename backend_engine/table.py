"""The running requests as tensors: page tables, last tokens, sampling parameters. Lays out a step from them.

The tensors are allocated once and written in place when a request comes, grows or goes, never per token and step.
"""

import numpy as np
import torch
from torch import Tensor

from .batch import Narrowing, StepBatch
from .pages import Pages
from .plan import Chunk, StepPlan
from .probe import PROBING_ROWS, Probe
from .sampling import SamplingTensors
from .sampling_table import SamplingTable
from .sequence import Rows, Sequence
from .steps import Draw
from .token_counts import TokenCounts


class RunningTable:
    """Rows for up to `rows` running requests of up to `width` pages each."""

    def __init__(self, *, rows: int, width: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.pages = np.zeros((rows, width), dtype=np.int32)
        # On a GPU, decode reads the pages where they are; one more row is for padding, with the page after the last.
        self._device_pages: Tensor | None = None
        self._stale: set[int] = set()
        self.counts = TokenCounts(device)
        self._length = np.zeros(rows, dtype=np.int64)
        self._token = np.zeros(rows, dtype=np.int64)
        self._free = list(range(rows - 1, -1, -1))
        self.sampling = SamplingTable(rows + 1, device)

    @property
    def full(self) -> bool:
        return not self._free

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a row."""
        sequence.row = self._free.pop()
        self._stale.add(sequence.row)
        self.sampling.enter(sequence.row, sequence.request.sampling, seed=sequence.seed, prompt=sequence.prompt)

    def leave(self, sequence: Sequence) -> None:
        self.pages[sequence.row] = 0
        self.counts.forget(sequence.row)
        self._free.append(sequence.row)
        sequence.row = -1

    def set_pages(self, sequence: Sequence, pages: Pages) -> None:
        row = self.pages[sequence.row]
        if len(pages) == len(sequence.pages) and np.array_equal(row[: len(pages)], pages):  # nothing to send
            sequence.pages = pages
            return
        row[len(pages) : len(sequence.pages)] = 0
        sequence.pages = pages
        self.pages[sequence.row, : len(pages)] = pages
        self._stale.add(sequence.row)

    def mirror(self, *, spare: int) -> Tensor:
        """Keep the page table on the device too, int32 [rows + 1, width]; the last row names the page `spare`."""
        rows, width = self.pages.shape
        self._device_pages = torch.zeros((rows + 1, width), dtype=torch.int32, device=self.device)
        self._device_pages[rows] = spare
        return self._device_pages

    def refresh(self, draw: Draw) -> None:
        """Bring up to date on the device what a step reads there that draws so, or what is drawn from it."""
        if draw is not Draw.LIKELIEST:
            self.sampling.refresh()
        self.refresh_pages()

    def refresh_pages(self) -> None:
        """Bring the page table on the device up to date, if there is one."""
        if self._device_pages is not None and len(self._stale) == 1:  # one transfer, and no kernel
            row = next(iter(self._stale))
            # Memory that is not pinned has been read when this returns.
            self._device_pages[row].copy_(torch.from_numpy(self.pages[row]), non_blocking=True)
        elif self._device_pages is not None and self._stale:
            rows = np.fromiter(self._stale, np.int64, len(self._stale))
            self._device_pages[self._tensor(rows)] = self._tensor(self.pages[rows])
        self._stale.clear()

    def single_rows(self, plan: StepPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, places in key order and table rows of a step in which every sequence runs one row; int64 on the host."""
        owners, index, ids = self._rows(plan)
        return torch.from_numpy(ids), torch.from_numpy(index), torch.from_numpy(owners)

    def mixed_rows(self, plan: StepPlan) -> tuple[Rows, Rows, Rows, Rows]:
        """The id and the place in key order of each row of a step; each sequence's table row and number of rows."""
        owners, index, ids = self._rows(plan)
        counts = np.fromiter((chunk.count for chunk in plan.chunks), np.int64, len(plan.chunks))
        return ids, index, owners, np.concatenate((plan.widths, counts))

    def _rows(self, plan: StepPlan) -> tuple[Rows, Rows, Rows]:
        """The table row of each sequence, and the place in key order and the id of each row of a step."""
        owners = np.fromiter((sequence.row for sequence in plan.sequences), np.int64)
        decoding = owners[: len(plan.decodes)]
        places, tokens = self._length[decoding] - 1, self._token[decoding]
        if plan.drafts:
            ahead = _counted(plan.widths)
            places = np.repeat(places, plan.widths) + ahead
            spread = np.empty_like(places)
            spread[ahead == 0], spread[ahead > 0] = tokens, np.concatenate(plan.drafts)
            tokens = spread
        index = np.concatenate([places, *(chunk.rows for chunk in plan.chunks)])
        ids = np.concatenate([tokens, *(chunk.sequence.tokens[chunk.rows] for chunk in plan.chunks)])
        return owners, index, ids

    def set_token(self, sequence: Sequence) -> None:
        """Note the sequence's newest token, which its next decode step runs."""
        self._token[sequence.row] = sequence.tokens[sequence.length - 1]
        self._length[sequence.row] = sequence.length

    def slots(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        """The slots of some of a sequence's keys, int64."""
        return self._tensor(self.slots_of(sequence, np.arange(start, stop)))

    def slots_of(self, sequence: Sequence, index: Rows) -> Rows:
        """The slots of the keys at some places in key order, on the host."""
        return sequence.pages[index // self.page_size].astype(np.int64) * self.page_size + index % self.page_size

    def drawing(self, plan: StepPlan) -> SamplingTensors:
        """The parameters with which each row that draws a token does so, in the order of the plan."""
        sequences = plan.drawing
        rows = np.fromiter((sequence.row for sequence in sequences), np.int64, len(sequences))
        drawn = np.fromiter((sequence.generated for sequence in sequences), np.int64, len(sequences))
        if plan.drafts:
            widths = np.fromiter((1 + len(draft) for draft in plan.guesses), np.int64, len(sequences))
            rows, drawn = np.repeat(rows, widths), np.repeat(drawn, widths) + _counted(widths)
        self.sampling.refresh()
        return self.sampling.rows(self._tensor(rows), drawn=self._tensor(drawn))

    def layout(self, plan: StepPlan) -> StepBatch:
        """The step as tensors, on the device."""
        owners, index, ids = self._rows(plan)
        decodes, widths = len(plan.decodes), plan.widths
        counts = np.concatenate((widths, [chunk.count for chunk in plan.chunks])).astype(np.int64)
        starts = np.concatenate(([0], counts.cumsum()))
        visible = (index + 1).astype(np.int32)
        keys = visible[starts[1:] - 1]
        pages = self.pages[np.repeat(owners, counts), index // self.page_size].astype(np.int64)
        logits = [np.arange(starts[decodes])]
        logits += [start + chunk.logits for start, chunk in zip(starts[decodes:], plan.chunks, strict=False)]
        return StepBatch(
            ids=self._tensor(ids),
            positions=self._tensor(index),
            slots=self._tensor(pages * self.page_size + index % self.page_size),
            visible=self._tensor(visible),
            query_start=self._tensor(starts.astype(np.int32)),
            page_table=self._tensor(self.pages[owners, : -(-int(keys.max()) // self.page_size)]),
            key_count=self._tensor(keys),
            logit_rows=self._tensor(np.concatenate(logits)),
            query_start_host=tuple(starts.tolist()),
            key_count_host=tuple(keys.tolist()),
            logit_counts_host=(*widths.tolist(), *(len(rows) for rows in logits[1:])),
            narrowings=tuple(
                self._narrowing(decodes + number, chunk) for number, chunk in enumerate(plan.chunks) if chunk.narrowed
            ),
            probes=tuple(
                probe
                for start, chunk in zip(starts[decodes:].tolist(), plan.chunks, strict=False)
                if chunk.sequence.probing and (probe := self._probe(start, chunk)) is not None
            ),
            newest=True,
            until=1.0 if decodes else max(chunk.sequence.glances for chunk in plan.chunks),
        )

    def _narrowing(self, request: int, chunk: Chunk) -> Narrowing:
        reuse, repairable = chunk.sequence.request.reuse, chunk.sequence.repairable
        assert reuse is not None and reuse.selector is not None and repairable is not None
        mask = repairable[chunk.first : chunk.first + chunk.count]
        return Narrowing(
            request=request,
            selector=reuse.selector,
            repairable=self._tensor(np.flatnonzero(mask)),
            required=self._tensor(np.flatnonzero(~mask)),
            quota=chunk.quota,
        )

    def _probe(self, start: int, chunk: Chunk) -> Probe | None:
        """What the asking rows among a chunk's look at; `start` is its first row in the step."""
        sequence, reuse = chunk.sequence, chunk.sequence.request.reuse
        assert reuse is not None and reuse.chooser is not None and reuse.chooser.depth is not None
        asking = np.flatnonzero(chunk.rows >= max(sequence.asked, sequence.prompt - PROBING_ROWS))
        if not len(asking):
            return None
        if sequence.attention is None:
            sequence.attention = torch.zeros(sequence.asked, device=self.device)
        return Probe(
            rows=self._tensor(start + asking),
            slots=self.slots(sequence, 0, sequence.asked),
            depth=reuse.chooser.depth,
            until=reuse.chooser.until,
            attention=sequence.attention,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _counted(sizes: Rows) -> Rows:
    """0, 1, ... size - 1 for each of `sizes`, one after another."""
    return np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
