"""The sentence nearest to the question by words, which may stay though what must stay leaves no room for it."""

from collections.abc import Sequence

from .base import LossyOptions, missed_note
from .context import CompressionContext
from .lexical import Words, shared_with
from .result import LATE_NOTE
from .units import Choice, Units

# Over the budget goes one sentence at most: of so many characters, or of this share of the budget where that is more.
_ASIDE_CHARS, _ASIDE = 300, 0.1


def with_nearest(choice: Choice, units: Units, options: LossyOptions, context: CompressionContext) -> Choice:
    """With the sentence, of those that could go, that shares most with the question, though there is no room for it
    beside what must stay: without what answers all the rest stays for nothing. By words, and of what stays only where
    those stand; and within a ceiling. The note says how many tokens must stay without it.
    """
    keep, note = choice
    free = units.free(keep) if units.question else []
    scores = Words((units.texts[i] for i in free), expired=context.expired).bm25(units.question, stop_words=False)
    if len(scores) < len(free):
        note = f"{LATE_NOTE}: {len(scores)} of {len(free)} sentences compared with the question"
    target = options.target(units.tokens)
    longest = max(_ASIDE * target, _ASIDE_CHARS * units.per_char)
    near = [k for k, i in enumerate(free[: len(scores)]) if scores[k] > 0 and units.estimate(i) <= longest]
    if not near:
        return Choice(keep, note)
    best = free[max(near, key=lambda k: (scores[k], -k))]
    if _told_already(best, keep, units, context):
        return Choice(keep, note)
    wider = units.with_headings(keep, [best])
    size, fresh = units.size(keep), units.size(wider)
    if options.ceiling_tokens is not None and fresh > max(options.ceiling_tokens, target):
        return Choice(keep, note)
    if fresh > target and not note:
        note = missed_note(size, wanted=target, tokens=units.tokens)
    return Choice(wider, f"{note}, {fresh - size} more with the sentence nearest to the question" if note else note)


def _told_already(best: int, keep: Sequence[bool], units: Units, context: CompressionContext) -> bool:
    """Whether a unit that stays shares with the question what this one shares; also where there is no time to see."""
    shared = shared_with(units.question)
    asked = shared(units.texts[best])
    staying = (i for i, stays in enumerate(keep) if stays and i not in units.heads)
    return any(context.expired() or shared(units.texts[i]) >= asked for i in staying)
