"""Chunking by structure: sections, then blocks, then sentences; a chunk never has more tokens than allowed.

Without overlap the chunks of a text, joined, are the text. A code block is cut only if it does not fit into a chunk
alone, and then between lines. Deterministic.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .blocks import Block, blocks_of
from .boundaries import Span, Splitter, furthest, lines, longest_prefix, sentences, words

MIN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """`text` is the document's `[start:end]`. `headings` are the titles above its first line, outermost first."""

    start: int
    end: int
    text: str
    headings: tuple[str, ...]


class Chunker:
    """Cuts texts so that `count(chunk.text) <= max_tokens`. `count` is any measure of length, called a few times
    a block.

    `overlap` repeats up to so many tokens of whole sentences from the end of one chunk at the beginning of the next.
    Only a single character that is longer than `max_tokens` could break the limit; hence the minimum of 16.
    """

    def __init__(self, *, count: Callable[[str], int], max_tokens: int = 256, overlap: int = 0) -> None:
        assert max_tokens >= MIN_TOKENS, f"max_tokens {max_tokens} < {MIN_TOKENS}"
        assert 0 <= overlap <= max_tokens // 2, f"overlap {overlap} of {max_tokens}"
        self._count = count
        self._max = max_tokens
        self._overlap = overlap
        self._room = max_tokens - overlap

    def chunks(self, text: str, *, markdown: bool) -> list[Chunk]:
        """The chunks of a text, in order; none for a text of white space."""
        if not text.strip():
            return []
        pieces = [piece for block in blocks_of(text, markdown=markdown) for piece in self._fitting(text, block)]
        groups = list(self._pack(text, pieces))
        starts = [groups[0][0].start, *(self._start(text, before, group) for before, group in pairwise(groups))]
        return [
            Chunk(start, group[-1].end, text[start : group[-1].end], group[0].headings)
            for start, group in zip(starts, groups, strict=True)
        ]

    def _fits(self, text: str, limit: int) -> bool:
        return self._count(text) <= limit

    def _fitting(self, text: str, block: Block) -> Iterator[Block]:
        """The block, or the parts that it must be cut into. Prose leaves room for the overlap; code takes all."""
        splitters, limit = ((lines, words), self._max) if block.code else ((sentences, lines, words), self._room)
        for start, end in self._split(text, (block.start, block.end), splitters, limit):
            yield replace(block, start=start, end=end, level=block.level if start == block.start else 0)

    def _split(self, text: str, span: Span, splitters: Sequence[Splitter], limit: int) -> Iterator[Span]:
        """Consecutive spans that fit: as many parts of the first splitter as go together, or finer parts of one."""
        start, end = span
        if self._fits(text[start:end], limit):
            yield span
        elif splitters:
            ends = [part_end for _, part_end in splitters[0](text, start, end)]
            yield from self._split_at(text, start, ends, splitters[1:], limit)
        else:
            while start < end:
                cut = longest_prefix(text, start, end, fits=lambda piece: self._fits(piece, limit))
                yield start, cut
                start = cut

    def _split_at(
        self, text: str, start: int, ends: Sequence[int], finer: Sequence[Splitter], limit: int
    ) -> Iterator[Span]:
        done = 0
        while done < len(ends):
            rest = ends[done:]
            fitting = furthest(len(rest), lambda n: self._fits(text[start : rest[n - 1]], limit))  # noqa: B023
            if fitting:
                yield start, rest[fitting - 1]
            else:
                yield from self._split(text, (start, rest[0]), finer, limit)
            done += max(fitting, 1)
            start = ends[done - 1]

    def _pack(self, text: str, pieces: Sequence[Block]) -> Iterator[list[Block]]:
        """Fill chunks with consecutive pieces.

        A new section begins a new chunk once the present one is half full, and a heading is not left behind as the last
        line of a chunk if it fits with what follows it.
        """
        group: list[Block] = []
        for piece in pieces:
            if group and self._must_close(text, group, piece):
                carried = self._trailing_headings(text, group, piece)
                yield group[: len(group) - len(carried)]
                group = carried
            group.append(piece)
        if group:
            yield group

    def _must_close(self, text: str, group: list[Block], piece: Block) -> bool:
        start = group[0].start
        if piece.level and not group[-1].level and self._count(text[start : group[-1].end]) * 2 >= self._max:
            return True
        return not self._fits(text[start : piece.end], self._room)

    def _trailing_headings(self, text: str, group: list[Block], piece: Block) -> list[Block]:
        """The headings at the end of `group` that `piece` stands directly under; they move on to its chunk."""
        first, rank = len(group), piece.level or 7
        while first > 1 and 0 < group[first - 1].level < rank:
            if not self._fits(text[group[first - 1].start : piece.end], self._room):
                break
            first -= 1
            rank = group[first].level
        return group[first:]

    def _start(self, text: str, before: list[Block], group: list[Block]) -> int:
        """Where the chunk of `group` begins once it overlaps the prose at the end of `before`."""
        start, end = group[0].start, group[-1].end
        if not self._overlap:
            return start
        prose = max([block.end for block in before if block.code], default=before[0].start)
        for sentence, _ in reversed(list(sentences(text, prose, before[-1].end))):
            small = self._count(text[sentence : group[0].start]) <= self._overlap
            if sentence <= before[0].start or not small or not self._fits(text[sentence:end], self._max):
                break
            start = sentence
        return start
