"""The html compressor: a page's text instead of its source. Scripts, styles and attributes are lost; headings, lists,
tables, preformatted text and, unless switched off, links stay, as Markdown has them. Parsed by libxml2.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...prompt import Kind, PromptsluiceError
from ..base import Task, TextCompressor
from ..context import CompressionContext
from ..options import flag, kinds, option
from ..result import Rewrite

_PAGE = re.compile(
    r"\s*+(?:<!--.{0,2000}?-->\s*+)?<(?:!doctype\s+html|html|head|body|div|main|article|section|header|nav|table|ul|ol|p"
    r"|h[1-6]|form|center)\b",
    re.IGNORECASE | re.DOTALL,
)
_GONE = frozenset({"script", "style", "noscript", "template", "svg", "iframe", "object", "canvas", "select"})
_BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "center", "dd", "details", "div", "dl", "dt", "fieldset"}
    | {"figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "main"}
    | {"nav", "ol", "p", "pre", "section", "summary", "table", "title", "ul"}
)
_OPENINGS = {**{f"h{level}": "#" * level + " " for level in range(1, 7)}, "li": "- ", "td": "| ", "th": "| "}
_BEGINS_LINE = frozenset({"br", "li", "tr", "dt", "dd", "option"})
_SPACE = re.compile(r"[ \t\r\n\f]+")
# Of a page that nests deeper no browser would show anything; the parser's work grows with it.
_DEEPEST = 256
_PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Html(TextCompressor):
    """Only texts that are a page or a part of one, from their first tag on. `links`: where they lead is kept."""

    name = "html"
    lossless = False

    kinds: frozenset[Kind] = option(frozenset({Kind.DOCUMENT, Kind.TOOL_RESULT}), kinds)
    links: bool = option(True, flag)

    def applies(self, text: str) -> bool:
        return is_page(text)

    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        if not is_page(task.text):
            return Rewrite.whole(task.text)
        text = text_of(task.text, links=self.links)
        # The text of a page about HTML may look like one itself, and would be read as one the next time.
        if not text or is_page(text):
            return Rewrite.whole(task.text, note="html: a page without a text of its own stays")
        return Rewrite((text,))


def is_page(text: str) -> bool:
    """Whether a text begins as HTML and closes what it opens."""
    return _PAGE.match(text) is not None and "</" in text


def text_of(page: str, *, links: bool = True) -> str:
    """The text of a page, in linear time. PromptsluiceError for one that nests deeper than 256 elements."""
    etree: Any = import_module("lxml.etree")  # an extension module without type stubs
    parser = etree.HTMLParser(target=_Writer(links=links))
    source = page.encode("utf-8", "replace").decode()
    for at in range(0, len(source), _PIECE):
        parser.feed(source[at : at + _PIECE])
    return parser.close()


class _Writer:
    """What the parser calls, and what it makes of a page."""

    def __init__(self, *, links: bool) -> None:
        self._links = links
        self._lines: list[str] = []
        self._line: list[str] = []
        self._depth = self._gone = self._exact = 0
        self._targets: list[str] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise PromptsluiceError("the page is nested too deep")
        self._gone += tag in _GONE
        if self._gone:
            return
        if tag in _BLOCKS:
            self._paragraph()
        elif tag in _BEGINS_LINE:
            self._end_line()
        if opening := _OPENINGS.get(tag):
            self._line.append(opening)
        self._exact += tag == "pre"
        if tag == "a":
            self._targets.append(_target(attributes.get("href", "")) if self._links else "")
            self._line.append("[" if self._targets[-1] else "")
        elif tag == "img" and attributes.get("alt"):
            self._line.append(f"[image: {_SPACE.sub(' ', attributes['alt']).strip()}]")

    def end(self, tag: str) -> None:
        self._depth -= 1
        if self._gone:
            self._gone -= tag in _GONE
            return
        if tag == "a" and self._targets and (target := self._targets.pop()):
            self._line.append(f"]({target})")
        elif tag in ("td", "th"):
            self._line.append(" ")
        elif tag in _BLOCKS:
            self._paragraph()
        self._exact -= tag == "pre"

    def data(self, data: str) -> None:
        if self._gone:
            return
        if not self._exact:
            self._line.append(_SPACE.sub(" ", data))
            return
        first, *rest = data.replace("\r\n", "\n").split("\n")
        self._line.append(first)
        for line in rest:
            self._end_line()
            self._line.append(line)

    def close(self) -> str:
        self._end_line()
        return "\n".join(self._lines).strip("\n ")

    def _end_line(self) -> None:
        line = "".join(self._line)
        self._line = []
        line = line.rstrip() if self._exact else _SPACE.sub(" ", line).strip()
        if line or (self._exact and self._lines and self._lines[-1]):
            self._lines.append(line)

    def _paragraph(self) -> None:
        """End the line; what follows stands behind a blank one, unless nothing has come since a mark of a list."""
        if "".join(self._line).strip() in ("-", "|"):
            return
        self._end_line()
        if self._lines and self._lines[-1]:
            self._lines.append("")


def _target(href: str) -> str:
    """Where a link leads, if that says anything outside the page: no anchors in it, no scripts, no data."""
    href = href.strip()
    return "" if href.lower().startswith(("#", "javascript:", "data:")) or _SPACE.search(href) else href
