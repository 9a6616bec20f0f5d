"""Steps that are recorded beforehand, as contracts. And their tensors.

Those without prefills are launched, read later, and launched again on the device.
"""

from collections.abc import Sequence
from enum import IntEnum
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from .batch import StepBatch
from .likeliest import likeliest
from .sampling import sample_ahead
from .sampling_table import SamplingTable
from .sequence import Rows


class Draw(IntEnum):
    """How a step's ids come to be. What a kind can draw, later ones can, too."""

    HOST = 0  # by whoever reads the logits
    LIKELIEST = 1
    SAMPLED = 2  # from the whole distribution
    FILTERED = 3


class Launched(Protocol):
    """A step that runs or has run."""

    def logits(self) -> Tensor:
        """Float32 [requests, vocab]. Must be asked for before the next launch."""
        ...

    def ids(self) -> list[int]:
        """The token drawn for each request, or UNDECIDED; waits for the step. Before the launch after the next."""
        ...


class SingleRowSteps(Protocol):
    """Decodes one token a request, or verifies some that were guessed.

    Page tables and sampling parameters are read where the engine's running table has them on the device.
    """

    @property
    def drafting(self) -> tuple[int, int]:
        """The most requests, and the most rows of each, that `drafted` takes; none if it takes no step at all."""
        ...

    def run(self, ids: Tensor, places: Tensor, rows: Tensor, *, draw: Draw) -> Launched:
        """Launch a step; ids, places in key order and table rows of the requests are int64 [requests] on the host."""
        ...

    def again(self, last: Launched, *, drawn: Tensor | None = None) -> Launched:
        """Launch the next step of the same requests, each with the token drawn in `last`, the newest launch.

        Where the drawing was left to the host, that hands in the tokens, int64 [requests] on the device. The next one
        is drawn as the last was. A request whose token is UNDECIDED runs in vain, on any other token.
        """
        ...

    def drafted(self, ids: Tensor, places: Tensor, rows: Tensor, widths: Sequence[int]) -> Tensor:
        """Launch a step in which request b runs `widths[b]` rows; the others are int64 [rows in all] on the host.

        Returns logits [rows in all, vocab].
        """
        ...


class MixedSteps(Protocol):
    """Runs decodes and prefills of up to `most` rows together. Page tables are read as by SingleRowSteps."""

    most: int

    def run(self, ids: Rows, places: Rows, owners: Rows, widths: Rows) -> Tensor:
        """Launch a step of which request b has `widths[b]` rows and the table row `owners[b]`, int64 [requests].

        `ids` and `places` in key order are int64 [rows]. Returns the hidden states [rows, hidden] after the last norm,
        in memory that the next step overwrites.
        """
        ...


def drawn(logits: Tensor, places: Tensor, rows: Tensor, table: SamplingTable, *, draw: Draw) -> Tensor:
    """The token after each place, int64 [requests], from logits [requests, vocab] of any width. Nothing is read back.

    `places` and `rows` (of the running table) are int64 [requests] on the device.
    """
    assert draw is not Draw.HOST
    if draw is Draw.LIKELIEST:
        return likeliest(logits)
    return sample_ahead(logits, table.after(places, rows), filtered=draw is Draw.FILTERED)


def even_batch(
    ids: Tensor, places: Tensor, owners: Tensor, pages: Tensor, *, width: int, page_size: int, max_tokens: int
) -> StepBatch:
    """A step of `width` rows for each request, of which the first ones are the request's own and each has its logits.

    `ids`, `places` and `owners` (rows of `pages`, the mirrored page tables) are int64 [requests * width] on the device.
    Rows that only fill up are at place 0 of the spare table row. Nothing is read back from the device.
    """
    rows = ids.shape[0]
    requests = rows // width
    if width == 1 and pages.device.type == "cuda":
        made = import_module(".steps_triton", __package__).single_rows(places, owners, pages, page_size=page_size)
        return StepBatch(
            ids=ids,
            positions=places,
            slots=made.slots,
            visible=made.visible,
            query_start=made.query_start,
            page_table=made.page_table,
            key_count=made.visible,
            logit_rows=made.numbers,
            query_start_host=tuple(range(rows + 1)),
            key_count_host=(max_tokens,) * rows,
            logit_counts_host=(1,) * rows,
            newest=True,
        )
    slots = pages[owners, places // page_size].long() * page_size + places % page_size
    seen = (places + 1).int()
    numbers = torch.arange(rows, device=pages.device)
    return StepBatch(
        ids=ids,
        positions=places,
        slots=slots,
        visible=seen,
        query_start=torch.arange(0, rows + 1, width, dtype=torch.int32, device=pages.device),
        page_table=pages[owners[::width]],
        key_count=seen if width == 1 else seen.view(requests, width).amax(1),
        logit_rows=numbers,
        query_start_host=tuple(range(0, rows + 1, width)),
        key_count_host=(max_tokens,) * requests,
        logit_counts_host=(width,) * requests,
        newest=True,
    )


def spread(rows: Tensor, widths: Sequence[int], *, width: int, out: Tensor) -> Tensor:
    """Write the ragged `rows` [3, rows] into `out` [3, requests * width], `width` places for each request.

    `rows` are ids, places and table rows; what is left of `out` stays. Returns where they went, int64 [rows].
    """
    sizes = torch.tensor(widths)
    ahead = torch.arange(rows.shape[1]) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    into = (torch.arange(len(widths)) * width).repeat_interleave(sizes) + ahead
    out[:, into] = rows
    return into
