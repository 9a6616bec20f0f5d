"""Token pruning in its steps, within the deadline: texts are taken apart, judged by whoever prunes, and cut to a budget
that they share.
"""

from collections.abc import Callable, Iterator, Sequence

from .atom_selection import AtomSelection
from .base import Task, missed_note
from .candidate import Candidate
from .context import CompressionContext
from .draft import Draft
from .pool import Pool
from .result import LATE_NOTE, Rewrite

# Characters a second that are taken apart, and for which the choice is made, at worst on one slow core.
_APART_SPEED, _SPEED = 100_000.0, 60_000.0


def drafts_in_time(tasks: Sequence[Task], context: CompressionContext) -> list[Draft]:
    """The draft of each task; none at all where there is no time to make them and to see what must stay."""
    needed = sum(len(task.text) for task in tasks) / _APART_SPEED
    if context.remaining() <= needed:
        return []
    drafts = [Draft.of(task) for task in tasks]
    return drafts if context.remaining() > needed else []


def unread(tasks: Sequence[Task]) -> Iterator[tuple[Task, Rewrite]]:
    """All texts whole, for want of time."""
    return ((task, Rewrite.whole(task.text, note=LATE_NOTE)) for task in tasks)


def settled(drafts: Sequence[Draft], target: Callable[[int], float], context: CompressionContext) -> bool:
    """Whether what must stay fills the budget, so that nothing need be judged."""
    if not all(any(draft.fixed) for draft in drafts):
        return False
    pool = Pool([Candidate.unjudged(draft) for draft in drafts], context.count)
    return pool.least >= target(pool.tokens)


def time_to_judge(texts: Sequence[str], context: CompressionContext) -> Callable[[], float]:
    """The seconds that are left until the choice must begin, which gets at most half of what there is now."""
    held = min(sum(map(len, texts)) / _SPEED, context.remaining() / 2)
    return lambda: max(0.0, context.remaining() - held)


def pruned(
    tasks: Sequence[Task], candidates: Sequence[Candidate], target: Callable[[int], float], context: CompressionContext
) -> Iterator[tuple[Task, Rewrite]]:
    """The rewrite of each task from its candidate. `target` says how many of so many tokens, in all, are to stay.

    What was not judged in time stays whole; so does everything where it is few enough already.
    """
    if not any(one.cut for one in candidates):
        yield from unread(tasks)
        return
    pool = Pool([one for one in candidates if one.cut], context.count)
    wanted = target(pool.tokens)
    if wanted >= pool.tokens:
        return
    kept = iter(pool.spans(AtomSelection(pool, context).within(wanted)))
    missed = missed_note(pool.least, wanted=wanted, tokens=pool.tokens) if pool.least > wanted else ""
    for task, one in zip(tasks, candidates, strict=True):
        spans = [*(next(kept) if one.cut else ()), (one.cut, len(task.text))]
        late = f"{LATE_NOTE}: {one.cut} of {len(task.text)} characters judged, the rest kept"
        notes = (late if one.cut < len(task.text) else "", missed if one.cut else "")
        yield task, Rewrite.of_kept(spans, note="; ".join(filter(None, notes)))
