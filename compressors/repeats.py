"""Repeated blocks: a later copy of text that stands earlier in the prompt becomes a one-line reference to it.

A block is a run of whole paragraphs (text between blank lines). The first copy always stays. A reference is only made
where a reader can find that copy without doubt: by its first and last words, and no other block begins like it. What is
decided about a segment depends on the segments before it alone, so later turns do not change earlier ones.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .blocks import REFERENCE
from .result import Piece, Rewrite

_REFERENCE = re.compile(REFERENCE)
_OPENING, _CLOSING = 60, 40


@dataclass(slots=True)
class _Paragraph:
    start: int
    end: int
    text: str | None
    """None once it has been replaced, or when it is a reference itself."""


@dataclass(slots=True)
class _Seen:
    """First places of paragraphs, and how many different paragraphs begin with the same words."""

    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    openings: dict[str, int] = field(default_factory=dict)

    def add_page(self, page: list[_Paragraph], number: int) -> None:
        """Note the paragraphs of a text that stays as it is."""
        for at, paragraph in enumerate(page):
            if paragraph.text is not None and paragraph.text not in self.first:
                self.add(paragraph.text, (number, at))

    def add(self, text: str, place: tuple[int, int]) -> None:
        """Note a text that was not seen before."""
        self.first[text] = place
        opening = _opening(text)
        self.openings[opening] = self.openings.get(opening, 0) + 1


def rewrites(texts: Iterable[tuple[int, str, bool]], *, least: int) -> Mapping[int, Rewrite]:
    """Find repeats in (key, text, may be changed) triples, in order; rewrites of the texts that have any.

    A run of repeated paragraphs must have at least `least` characters, which must be well above a reference's own
    length.
    """
    seen = _Seen()
    pages: list[list[_Paragraph]] = []
    done: dict[int, Rewrite] = {}
    for key, text, open_ in texts:
        page = list(_paragraphs(text))
        pages.append(page)
        if not open_:
            seen.add_page(page, len(pages) - 1)
        elif pieces := list(_references(text, pages, seen, least)):
            done[key] = Rewrite(tuple(pieces))
    return done


def _paragraphs(text: str) -> Iterator[_Paragraph]:
    """Text between blank lines; a fenced block is one with what touches it, blank lines inside included."""
    start: int | None = None
    end = at = 0
    fenced = False
    for line in text.split("\n"):
        fenced ^= line.lstrip(" \t>").startswith(("```", "~~~"))
        if fenced or (line and not line.isspace()):
            start = at if start is None else start
            end = at + len(line)
        elif start is not None:
            yield _paragraph(text, start, end)
            start = None
        at += len(line) + 1
    if start is not None:
        yield _paragraph(text, start, end)


def _paragraph(text: str, start: int, end: int) -> _Paragraph:
    body = text[start:end]
    return _Paragraph(start, end, None if _REFERENCE.fullmatch(body) else body)


def _references(text: str, pages: list[list[_Paragraph]], seen: _Seen, least: int) -> Iterator[Piece]:
    """The pieces of the last page's text with its repeats replaced; nothing when it has none."""
    page = pages[-1]
    here = len(pages) - 1
    at = done = 0
    while at < len(page):
        first = page[at]
        if first.text is None or (place := seen.first.get(first.text)) is None:
            if first.text is not None:
                seen.add(first.text, (here, at))
            at += 1
            continue
        # Ambiguous ones first: a run is only measured where it is used, or is shorter than `least`.
        run = 0 if seen.openings[_opening(first.text)] > 1 else _run(pages, place, at)
        last = page[at + run - 1]
        if not run or last.end - first.start < least:
            at += 1
            continue
        yield (done, first.start)
        yield _reference(text[first.start : last.end])
        done = last.end
        for gone in page[at : at + run]:
            gone.text = None
        at += run
    if done:
        yield (done, len(text))


def _run(pages: list[list[_Paragraph]], place: tuple[int, int], at: int) -> int:
    """How many paragraphs from `at` on the last page repeat those from `place` on."""
    source, page = pages[place[0]], pages[-1]
    limit = at - place[1] if source is page else len(source) - place[1]
    run = 0
    while run < limit and at + run < len(page):
        text = page[at + run].text
        if text is None or text != source[place[1] + run].text:
            break
        run += 1
    return run


def _opening(text: str) -> str:
    return " ".join(text[: 4 * _OPENING].split())[:_OPENING]


def _reference(block: str) -> str:
    closing = " ".join(block[-4 * _CLOSING :].split())[-_CLOSING:]
    return f"[repeat: the same {len(block)} characters as earlier, from “{_opening(block)}” to “{closing}”]"
