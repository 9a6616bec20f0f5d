"""How a request gets into the records: begun when it arrives, outlined when it is prepared, kept when it has ended."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ..prompt import PromptsluiceError
from .caller import Caller
from .edge import log_failure
from .house import Sluice
from .optimization import Optimized
from .records import Outline, Record, outlined


@contextmanager
def recorded(sluice: Sluice, caller: Caller) -> Iterator[Record]:
    """The record of a request, for what is done before it is dispatched: what fails in there is entered at once."""
    record, outcome = Record.of(caller), ""
    try:
        yield record
    except PromptsluiceError as error:
        record.failed(error)
        outcome = outcome_of(error.status)
        raise
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    except Exception:
        outcome, record.status = "failed", 500
        raise
    finally:
        if outcome and not record.outcome:
            record.ended(outcome)
            sluice.rooms.records.finished(record)


def outline_of(sluice: Sluice, record: Record | None, outcome: Optimized) -> Outline | None:
    """What becomes of each segment, where somebody may look at it. Fails open, as the optimizer does."""
    if record is None or not sluice.rooms.records.wanted:
        return None
    try:
        return outlined(
            outcome.planned or outcome.prompt,
            outcome.prompt,
            plan=outcome.plan,
            changes=[made for _, made in outcome.changes],
            text=sluice.policy_set.server.records.text,
        )
    except Exception as error:  # noqa: BLE001 - no request fails for what is only shown
        log_failure(error, request_id=record.request_id)
        return None


def show(record: Record | None, outcome: Optimized, outline: Outline | None) -> None:
    """Enter what was planned and what came of it."""
    if record is not None:
        record.planned(outcome.plan)
        record.outline = outline


def outcome_of(status: int) -> str:
    """As the metrics have it."""
    return "ok" if status < 400 else "refused" if status < 500 else "failed"
