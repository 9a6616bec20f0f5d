"""Where a long piece of text may be cut: between lines, sentences, words, and in the end characters.

Each splitter yields consecutive spans that cover `text[start:end]`. Sentences are found by punctuation alone, for
Latin, CJK and Indic scripts; a cut after an abbreviation costs nothing but a slightly worse chunk border.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator

Span = tuple[int, int]
Splitter = Callable[[str, int, int], Iterator[Span]]

_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n|$)")
# Every alternative starts where no earlier attempt could have: hostile runs of dots or blanks cost linear time.
_SENTENCE_END = re.compile(
    r"(?<![.!?…])[.!?…]++[\"'”’»)\]*_`]*+\s++"
    r"|[。！？；｡।॥]++[\"'”’」』）】]*+\s*+"
    r"|\n(?=[ \t]*+(?:[-*+]|\d{1,9}[.)])[ \t])"
)
_WORD_END = re.compile(r"\s+")
_JOINERS = "\u200d\ufe0e\ufe0f"


def lines(text: str, start: int, end: int) -> Iterator[Span]:
    """Lines with their ends."""
    yield from _cut_after(_LINE, text, start, end)


def sentences(text: str, start: int, end: int) -> Iterator[Span]:
    """Sentences and list items with the white space after them."""
    yield from _cut_after(_SENTENCE_END, text, start, end)


def words(text: str, start: int, end: int) -> Iterator[Span]:
    """Words with the white space after them."""
    yield from _cut_after(_WORD_END, text, start, end)


def _cut_after(pattern: re.Pattern[str], text: str, start: int, end: int) -> Iterator[Span]:
    done = start
    for match in pattern.finditer(text, start, end):
        if match.end() > done:
            yield done, match.end()
            done = match.end()
    if done < end:
        yield done, end


def furthest(n: int, fits: Callable[[int], bool]) -> int:
    """The largest k in 0..n for which `fits(k)`, taken to be true up to some k and false beyond.

    Gallops, then bisects, so that the cost depends on the answer and not on n. What it returns did fit, unless it is 0.
    """
    low, step = 0, 1
    while low + step <= n and fits(low + step):
        low += step
        step *= 2
    high = min(low + step, n + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_prefix(text: str, start: int, end: int, *, fits: Callable[[str], bool]) -> int:
    """The end of a piece of `text[start:end]` that fits and is about as long as can be, at least one character.

    Never separates a combining mark, a joiner or a variation selector from what it belongs to, unless it must.
    """
    longest = start + max(1, furthest(end - start, lambda n: fits(text[start : start + n])))
    whole = longest
    while whole > start and _belongs_to_left(text, whole):
        whole -= 1
    return whole if whole > start and fits(text[start:whole]) else longest


def _belongs_to_left(text: str, at: int) -> bool:
    return at < len(text) and (
        unicodedata.category(text[at]).startswith("M") or text[at] in _JOINERS or text[at - 1] == "\u200d"
    )
