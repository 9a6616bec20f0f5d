"""What a compressor did: which spans of the source were kept, per segment and in sum. Holds data, decides nothing."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from ..prompt import Kind, Path, Prompt

Span = tuple[int, int]
"""Half-open character range `(start, end)` of a source text."""

LATE = "late"
"""Why a step did not do all that it was asked for: the deadline passed."""
LATE_NOTE = "deadline reached"
FAILED_NOTE = "the original was kept"
"""What notes of such steps say."""

Piece = Span | str
"""A kept span of the source, or a text that was put in."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A text derived from a source: kept spans, ascending and disjoint, and inserted texts, in order of output.

    A rewrite without strings only leaves out: it cannot reorder or alter what it keeps.
    """

    pieces: tuple[Piece, ...]
    note: str = ""

    @classmethod
    def whole(cls, source: str, *, note: str = "") -> "Rewrite":
        """The source unchanged."""
        return cls(((0, len(source)),) if source else (), note)

    @classmethod
    def of_kept(cls, spans: Iterable[Span], *, note: str = "") -> "Rewrite":
        """Only these spans, ascending; neighbours that touch become one."""
        return cls(tuple(touching_joined(spans)), note)

    @classmethod
    def of_pieces(cls, pieces: Iterable[Piece]) -> "Rewrite":
        """These pieces, kept spans ascending; neighbouring spans that touch become one."""
        joined: list[Piece] = []
        for piece in pieces:
            last = joined[-1] if joined else ""
            if isinstance(piece, str) or isinstance(last, str) or last[1] != piece[0]:
                joined.append(piece)
            else:
                joined[-1] = (last[0], piece[1])
        return cls(tuple(piece for piece in joined if isinstance(piece, str) or piece[0] < piece[1]))

    @property
    def kept(self) -> tuple[Span, ...]:
        """The kept spans of the source; neighbours that touch are one span unless a text was put in between."""
        runs: list[list[Span]] = [[]]
        for piece in self.pieces:
            if isinstance(piece, str):
                runs.append([])
            else:
                runs[-1].append(piece)
        return tuple(span for run in runs for span in touching_joined(run))

    def text(self, source: str) -> str:
        """The derived text."""
        return "".join(piece if isinstance(piece, str) else source[piece[0] : piece[1]] for piece in self.pieces)

    def then(self, later: "Rewrite") -> "Rewrite":
        """Both in one step: `later` was made from this rewrite's text; the result speaks of this rewrite's source."""
        starts: list[int] = []
        at = 0
        for piece in self.pieces:
            starts.append(at)
            at += len(piece) if isinstance(piece, str) else piece[1] - piece[0]
        joined: list[Piece] = []
        for piece in later.pieces:
            joined += [piece] if isinstance(piece, str) else self._cut(piece, starts)
        return Rewrite(tuple(joined), "; ".join(filter(None, (self.note, later.note))))

    def _cut(self, span: Span, starts: list[int]) -> Iterable[Piece]:
        """The pieces of this rewrite that lie in `span` of its text; `starts` are the pieces' offsets there."""
        index = max(0, bisect_right(starts, span[0]) - 1)
        while index < len(self.pieces) and starts[index] < span[1]:
            piece, offset = self.pieces[index], starts[index]
            size = len(piece) if isinstance(piece, str) else piece[1] - piece[0]
            low, high = max(0, span[0] - offset), min(size, span[1] - offset)
            if low < high:
                yield piece[low:high] if isinstance(piece, str) else (piece[0] + low, piece[0] + high)
            index += 1


def touching_joined(spans: Iterable[Span]) -> Iterable[Span]:
    """Ascending disjoint spans with touching neighbours joined and empty ones left out."""
    start = end = -1
    for low, high in spans:
        if low == high:
            continue
        if low == end:
            end = high
            continue
        if end > start:
            yield start, end
        start, end = low, high
    if end > start:
        yield start, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of one segment. Sizes in tokens of the backend. `pieces` as in Rewrite, over the text before."""

    segment: int
    path: Path
    kind: Kind
    tokens_before: int
    tokens_after: int
    pieces: tuple[Piece, ...]
    note: str = ""

    @property
    def kept(self) -> tuple[Span, ...]:
        """The spans of the text before that are still there."""
        return Rewrite(self.pieces).kept

    @property
    def rate(self) -> float:
        """Tokens after over tokens before; 1.0 for an empty text."""
        return self.tokens_after / self.tokens_before if self.tokens_before else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """A compressor's answer: the new prompt and one Change for each segment that it looked at.

    `notes` say what could not be done and why; empty when all went as asked.
    """

    prompt: Prompt
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tokens_before(self) -> int:
        return sum(change.tokens_before for change in self.changes)

    @property
    def tokens_after(self) -> int:
        return sum(change.tokens_after for change in self.changes)

    @property
    def rate(self) -> float:
        """Tokens after over tokens before in the segments looked at; 1.0 when there were none."""
        return self.tokens_after / self.tokens_before if self.tokens_before else 1.0

    @property
    def trouble(self) -> str:
        """A slug for why not all was done that was asked for: `late` or `error`; "" when all went well."""
        said = self.note
        if LATE_NOTE in said or TimeoutError.__name__ in said:
            return LATE
        return "error" if FAILED_NOTE in said else ""

    @property
    def note(self) -> str:
        """All notes in one line, each once."""
        return "; ".join(dict.fromkeys((*self.notes, *(change.note for change in self.changes if change.note))))
