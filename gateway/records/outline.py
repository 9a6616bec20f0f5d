"""The outline of a prompt: what stood in it and what became of each segment; its text only where that is wanted.

Bounded: of a prompt with more segments than `_SEGMENTS` the last ones are only counted, and of long texts the
beginnings are kept.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

from ...compressors.result import Change, Rewrite
from ...policies import Decision, Plan
from ...prompt import Prompt, Segment

_SEGMENTS = 400
_PARTS = 2000  # of one segment, told apart; in sum beyond that
_PART_CHARS = 16_384
_TEXT_CHARS = 262_144  # of one prompt
_SEGMENT_BYTES, _PART_BYTES = 600, 100  # about what the objects themselves take


class Fate(StrEnum):
    """What became of a segment, or of a part of its text. Whether its KV was reused is in the report."""

    KEPT = "kept"
    PRUNED = "pruned"
    SUMMARIZED = "summarized"
    RETRIEVED = "retrieved"


class Part(NamedTuple):
    """A stretch of characters: kept, pruned, put in its place (summarized), or retrieved. `text` may be cut short."""

    fate: Fate
    chars: int
    text: str | None = None


class SegmentOutline(NamedTuple):
    """One segment. `tokens` are those before and after, None where nobody has counted them one by one.

    Tuples are made faster than dataclasses: a prompt may have hundreds, and some are outlined on the event loop.
    """

    id: int
    message: int
    role: str
    kind: str
    source: str | None
    fate: Fate
    reason: str
    uses: tuple[str, ...] = ()
    tokens: tuple[int, int] | None = None
    parts: tuple[Part, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """As JSON."""
        return {**self._asdict(), "parts": [part._asdict() for part in self.parts]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """`left_out` segments more are not told apart. `nbytes` is about what all of it takes in memory."""

    segments: tuple[SegmentOutline, ...] = ()
    left_out: int = 0
    nbytes: int = 0


def outlined(
    before: Prompt, after: Prompt, *, plan: Plan | None = None, changes: Iterable[Sequence[Change]] = (), text: bool
) -> Outline:
    """From the prompt as it was planned for, `before`, to what is sent. `changes` are those of each step in order."""
    decisions = {one.segment: one for one in plan.decisions} if plan else {}
    texts = {one.id: one.text for one in after.segments}
    made = _Outliner(decisions, _rewrites(changes), texts, left=_TEXT_CHARS if text else 0)
    segments = tuple(map(made.segment, islice(before.segments, _SEGMENTS)))
    parts = [part for segment in segments for part in segment.parts]
    held = sum(sys.getsizeof(part.text) for part in parts if part.text is not None)
    return Outline(
        segments=segments,
        left_out=len(before.segments) - len(segments),
        nbytes=held + _SEGMENT_BYTES * len(segments) + _PART_BYTES * len(parts),
    )


class _Outliner:
    """Outlines one segment after the other; `left` characters of text may still be kept."""

    def __init__(
        self,
        decisions: Mapping[int, Decision],
        rewrites: Mapping[int, "_Sized"],
        texts: Mapping[int, str],
        *,
        left: int,
    ) -> None:
        self._decisions, self._rewrites, self._texts, self._left = decisions, rewrites, texts, left

    def segment(self, segment: Segment) -> SegmentOutline:
        decision, sized = self._decisions.get(segment.id), self._rewrites.get(segment.id)
        if self._texts.get(segment.id) == segment.text:
            fate = Fate.KEPT if segment.original is not None else Fate.RETRIEVED
            parts = (self._part(fate, segment.text),) if segment.text else ()
        else:
            parts = tuple(self._joined(self._parts(segment, sized)))
            fate = _fate(parts)
        return SegmentOutline(
            id=segment.id,
            message=segment.message,
            role=segment.role,
            kind=segment.kind,
            source=segment.source,
            fate=fate,
            reason=decision.reason if decision else "" if segment.original is None else "the policy changes nothing",
            uses=decision.uses if decision else (),
            tokens=(decision.tokens, sized.tokens if sized else decision.tokens) if decision else None,
            parts=parts,
        )

    def _parts(self, segment: Segment, sized: "_Sized | None") -> Iterator[tuple[Fate, str]]:
        """Of a text that has changed."""
        if sized is not None:
            yield from _pieces(sized.rewrite, segment.text)
        else:
            yield Fate.PRUNED, segment.text
            yield Fate.SUMMARIZED, self._texts.get(segment.id, "")

    def _joined(self, found: Iterable[tuple[Fate, str]]) -> Iterator[Part]:
        """Parts with as much text as there is room for; else one for each fate, by its sum of characters."""
        parts = [(fate, text) for fate, text in found if text]
        if self._left <= 0 or len(parts) > _PARTS:
            for fate in dict.fromkeys(fate for fate, _ in parts):
                yield Part(fate, sum(len(text) for one, text in parts if one is fate))
            return
        for fate, text in parts:
            yield self._part(fate, text)

    def _part(self, fate: Fate, text: str) -> Part:
        if self._left <= 0:
            return Part(fate, len(text))
        kept = text[: min(_PART_CHARS, self._left)]
        self._left -= len(kept)
        return Part(fate, len(text), kept)


@dataclass(slots=True)
class _Sized:
    rewrite: Rewrite
    tokens: int


def _rewrites(changes: Iterable[Sequence[Change]]) -> dict[int, _Sized]:
    """By segment, all steps in one."""
    found: dict[int, _Sized] = {}
    for change in (change for step in changes for change in step):
        rewrite, earlier = Rewrite(change.pieces), found.get(change.segment)
        found[change.segment] = _Sized(earlier.rewrite.then(rewrite) if earlier else rewrite, change.tokens_after)
    return found


def _pieces(rewrite: Rewrite, source: str) -> Iterator[tuple[Fate, str]]:
    """The source from end to end, and what was put in, behind what it stands for."""
    at = 0
    put_in: list[str] = []
    for piece in (*rewrite.pieces, (len(source), len(source))):
        if isinstance(piece, str):
            put_in.append(piece)
            continue
        start, end = piece
        yield Fate.PRUNED, source[at:start]
        yield Fate.SUMMARIZED, "".join(put_in)
        yield Fate.KEPT, source[start:end]
        at, put_in = end, []


def _fate(parts: Sequence[Part]) -> Fate:
    """A segment's, by what happened to some of it."""
    found = {part.fate for part in parts}
    return next((fate for fate in (Fate.RETRIEVED, Fate.SUMMARIZED, Fate.PRUNED) if fate in found), Fate.KEPT)
