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
    """Decodes one token a request.

    Page tables and sampling parameters are read where the engine's running table has them on the device.
    """

    def run(self, ids: Tensor, places: Tensor, rows: Tensor, *, draw: Draw) -> Launched:
        """Launch a step; ids, places in key order and table rows of the requests are int64 [requests] on the host."""
        ...

    def again(self, last: Launched, *, drawn: Tensor | None = None) -> Launched:
        """Launch the next step of the same requests, each with the token drawn in `last`, the newest launch.

        Where the drawing was left to the host, that hands in the tokens, int64 [requests] on the device. The next one
        is drawn as the last was. A request whose token is UNDECIDED runs in vain, on any other token.
        """
        ...


class MixedSteps(Protocol):
    """Runs decodes, tokens guessed for them and prefills together. Page tables are read as by SingleRowSteps."""

    @property
    def sizes(self) -> Sequence[int]:
        """The numbers of rows that steps are recorded for, ascending: one between two of them runs as the larger."""
        ...

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


def single_batch(
    ids: Tensor, places: Tensor, owners: Tensor, pages: Tensor, *, page_size: int, max_tokens: int
) -> StepBatch:
    """A step of one row for each request, which has its logits. Nothing is read back from the device.

    `ids`, `places` and `owners` (rows of `pages`, the mirrored page tables) are int64 [requests] on the device. Rows
    that only fill up are at place 0 of the spare table row.
    """
    rows, device = ids.shape[0], pages.device
    if device.type == "cuda":
        made = import_module(".steps_triton", __package__).single_rows(places, owners, pages, page_size=page_size)
        slots, visible, page_table = made.slots, made.visible, made.page_table
        query_start, numbers = made.query_start, made.numbers
    else:
        slots = pages[owners, places // page_size].long() * page_size + places % page_size
        visible, page_table = (places + 1).int(), pages[owners]
        query_start, numbers = (
            torch.arange(rows + 1, dtype=torch.int32, device=device),
            torch.arange(rows, device=device),
        )
    return StepBatch(
        ids=ids,
        positions=places,
        slots=slots,
        visible=visible,
        query_start=query_start,
        page_table=page_table,
        key_count=visible,
        logit_rows=numbers,
        query_start_host=tuple(range(rows + 1)),
        key_count_host=(max_tokens,) * rows,
        logit_counts_host=(1,) * rows,
        newest=True,
    )
