"""The structure of a text: consecutive blocks (headings, paragraphs, code, ...) that together are the whole text.

Markdown is parsed by markdown-it-py, block rules only; inline markup is not looked at. Offsets are in characters.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt

_LINE_END = re.compile(r"\r\n?|\n")
_BLANK_LINES = re.compile(r"(?:\r\n?|\n)(?:[ \t]*(?:\r\n?|\n))+")
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n.*?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_TITLE_CHARS = 200
_LEAVES = frozenset({"heading_open", "paragraph_open", "fence", "code_block", "html_block", "hr", "table_open"})
_CODE = frozenset({"fence", "code_block"})


@dataclass(frozen=True, slots=True)
class Block:
    """`text[start:end]`, with white space after it included.

    `headings` are the titles it stands under, outermost first; a heading does not stand under itself. `level` is a
    heading's rank (1 to 6), else 0.
    """

    start: int
    end: int
    headings: tuple[str, ...]
    code: bool = False
    level: int = 0


def blocks_of(text: str, *, markdown: bool) -> list[Block]:
    """Cut a text into blocks that cover it without gap."""
    return list(_markdown_blocks(text) if markdown else _paragraphs(text))


def _paragraphs(text: str) -> Iterator[Block]:
    start = 0
    for gap in _BLANK_LINES.finditer(text):
        if text[start : gap.start()].strip():
            yield Block(start, gap.end(), ())
            start = gap.end()
    if start < len(text):
        yield Block(start, len(text), ())


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])
    return parser


def _markdown_blocks(text: str) -> Iterator[Block]:
    """Every leaf block runs from its first line to that of the next; what stands before the first belongs to it."""
    front = _FRONT_MATTER.match(text)
    offset = front.end() if front else 0
    lines = [offset, *(match.end() for match in _LINE_END.finditer(text, offset))]
    tokens = _parser().parse(text[offset:])
    starts: list[tuple[int, bool, int, str]] = [(0, False, 0, "")] if front else []
    for i, token in enumerate(tokens):
        if token.type not in _LEAVES or token.map is None:
            continue
        level = int(token.tag[1]) if token.type == "heading_open" else 0
        title = _title(tokens[i + 1].content) if level else ""
        starts.append((lines[token.map[0]], token.type in _CODE, level, title))
    if not starts:
        yield from _paragraphs(text)
        return
    starts[0] = (0, *starts[0][1:])
    ends = [start for start, *_ in starts[1:]] + [len(text)]
    path: list[tuple[int, str]] = []
    for (start, code, level, title), end in zip(starts, ends, strict=True):
        if level:
            path = [(rank, above) for rank, above in path if rank < level]
        if end > start:
            yield Block(start, end, tuple(above for _, above in path), code, level)
        if level:
            path.append((level, title))


def _title(content: str) -> str:
    """A heading's text without an anchor in braces at its end, cut to a length that may be repeated for every chunk."""
    title = content.strip()
    before, brace, anchor = title.rpartition("{")
    if brace and title.endswith("}") and anchor.lstrip().startswith("#"):
        title = before.rstrip()
    return title[:_TITLE_CHARS]
