"""What a summary must say as its source says it, and what it must not say at all.

Facts are protected spans (numbers, dates, identifiers, addresses, code, quotations), names, and sentences that decide
or ask for something. A fact that a summary lost is given back by the sentence of the source that holds it; a summary
with numbers or addresses that its source does not hold is none.
"""

import re
from collections.abc import Collection, Iterator, Sequence

from ..protect import protected_spans
from ..result import Span
from ..sentences import Unit, units_of

FACTS = frozenset({"name", "decision"})
"""Facts beside the protected categories. Names are found by their capitals, decisions by English words."""

_INVENTED = frozenset({"number", "date", "url", "email"})
# Two capitalized words in a row, or one that does not begin a sentence.
_NAME = re.compile(
    r"\b[A-ZÀ-ÖØ-Þ][\w'’-]+(?:[ ](?:(?:of|de|van|von|la|bin|al)[ ])?[A-ZÀ-ÖØ-Þ][\w'’-]+)+"
    r"|(?<=[a-zß-öø-ÿ0-9,;][ ])[A-ZÀ-ÖØ-Þ][a-zß-öø-ÿ][\w'’-]*"
)
_DECISION = re.compile(
    r"\b(?:decid\w+|agreed?|approv\w+|reject\w+|chose|chosen|concluded?|commit(?:ted)?|promis\w+|deadline|due|shall"
    r"|must(?:n't)?|need(?:s|ed)? to|have to|has to|never|action items?|to[- ]?do|next steps?|open question|not allowed"
    r"|cannot|can't|refus\w+|cancel\w*|instead)\b",
    re.IGNORECASE,
)


def lost(source: str, summary: str, *, protect: Collection[str], facts: Collection[str]) -> list[Span]:
    """The sentences of the source that hold a fact which the summary does not, ascending and disjoint."""
    spans = protected_spans(source, categories=protect)
    units = units_of(source, whole=spans)
    wanted = sorted({*spans, *(_names(source) if "name" in facts else ())})
    missing = [span for span in wanted if source[slice(*span)] not in summary]
    return [unit.span for unit in _holding(source, units, missing, decisions="decision" in facts)]


def invents(source: str, summary: str) -> bool:
    """Whether a summary has a number, a date or an address that its source does not have."""
    spans = protected_spans(summary, categories=_INVENTED)
    return any(summary[start:end].strip("~≈+<>≤≥ ") not in source for start, end in spans)


def _names(source: str) -> Iterator[Span]:
    return (match.span() for match in _NAME.finditer(source))


def _holding(source: str, units: Sequence[Unit], missing: Sequence[Span], *, decisions: bool) -> Iterator[Unit]:
    at = 0
    for unit in units:
        while at < len(missing) and missing[at][1] <= unit.start:
            at += 1
        holds = at < len(missing) and missing[at][0] < unit.end
        if holds or (decisions and _DECISION.search(source, unit.start, unit.end)):
            yield unit
