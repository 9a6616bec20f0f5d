"""The code compressor: source code without comments and, where the policy says so, documentation and bodies.

A whole text that looks like source in a known language, such as a file that a tool has read; of retrieved Markdown the
fenced blocks that name one. Fenced blocks of messages are segments of their own, which nothing rewrites.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...prompt import Kind
from ..base import Task, TextCompressor
from ..context import CompressionContext
from ..options import flag, kinds, option
from ..protect import protected_spans
from ..result import LATE_NOTE, Piece, Rewrite, Span
from ..spans import union
from .languages import LANGUAGES, dialect, foreign, guessed, named
from .syntax import Syntax, syntax_of

_FENCE = re.compile(r"^[ ]{0,3}+(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)
_HUNK = re.compile(r"^@@ -\d", re.MULTILINE)
_LEFT_OUT = "{count} lines left out"
# Comments that tools read, wherever in a comment they are told, and what this compressor wrote itself.
_DIRECTIVE = re.compile(
    r"\A(?:#!|/\*\s{0,9}(?:globals?|exported)\s|//(?:export|line)\s)|[@#]__(?:PURE|NO_SIDE_EFFECTS|INLINE|NOINLINE)__"
    r"|\b(?:(?:file)?(?:en)?coding\s?[:=]|type:|pragma|pylint|pyright|pyre-|pytype|mypy|ruff|fmt:|yapf|isort|black:"
    r"|autopep8|codespell|cython:|distutils:|doctest:|nosemgrep|vim?:|go:\w|lint:|rustfmt|tarpaulin|eslint|tslint"
    r"|jshint|jslint|jscs|oxlint|stylelint|prettier|biome-|rome-|deno-|dprint-|istanbul|[cv]8\s|webpack\w*:|swc-|clang-"
    r"|cppcheck|iwyu|sourceMappingURL|sourceURL|fall[ -]?(?:through|thru)|SPDX|cspell|spell-?checker|noinspection"
    r"|checkstyle|code\sgenerated|\d+\slines\sleft\sout)"
    r"|no(?:qa|sec|lint|sonar)|\+build\b|-\*-|\$Flow|<(?:reference|amd-)|@(?:ts-|flow|no-?flow|jsx|vite-|formatter|generated"
    r"|preserve|license|cc_on|strict\b|format\b|noformat\b|noprettier\b)",
    re.IGNORECASE,
)
# Comments that are a program's, or its metadata: C before Go's import "C", and the block of PEP 723.
_C_IN_GO = re.compile(r"^import[ \t]++\"C\"", re.MULTILINE)
_METADATA = re.compile(r"# /// [\w-]++\s*+\Z")
_DOCUMENTS = re.compile(r"/\*[*!](?!/)|//[/!]")
_LINE_END = re.compile(r"[ \t\r]*+(?:\n|\Z)")
_SPACE = re.compile(r"\s*+")
_WORD = re.compile(r"[\w$]+")
_NEWLINE = re.compile(r"\n")
_FEWEST = 3  # lines of a body: of fewer, more would be said than left out
_FEWEST_CUES = 3  # lines by which a text without fences is taken for source
# Without a deadline of the request, so long and so much per character; usual source takes a hundredth.
_SECONDS, _PER_CHAR = 0.5, 5e-6
_OF_THE_TIME = 0.6  # what is left of the request's; the parser ends a little after it was told to


@dataclass(frozen=True, kw_only=True)
class Code(TextCompressor):
    """`comments` go (not those that tools read, nor shebangs); `docstrings`: documentation goes too, `bodies`: those of
    functions with three lines or more, but for functions that the question names and what is within or around them.

    What could not be parsed stays (all of a text whose language is guessed), and so does what stands between keep
    marks. The source that is left parses where it did before; with `bodies` it is an outline.
    """

    name = "code"
    lossless = False

    kinds: frozenset[Kind] = option(frozenset({Kind.DOCUMENT, Kind.TOOL_RESULT}), kinds)
    comments: bool = option(True, flag)
    docstrings: bool = option(False, flag)
    bodies: bool = option(False, flag)

    @property
    def cost_name(self) -> str:
        """What is left depends on what goes."""
        chosen = [name for name in ("comments", "docstrings", "bodies") if getattr(self, name)]
        return self.name if chosen == ["comments"] else "-".join([self.name, *chosen])

    def applies(self, text: str) -> bool:
        language, _, blocks = _looks(text)
        return language is not None or bool(blocks)

    def protected(self, text: str) -> tuple[Span, ...]:
        return protected_spans(text, categories=())

    def rewrite_text(self, task: Task, *, context: CompressionContext) -> Rewrite:
        bodies: list[_Cut] = []
        rest: list[_Cut] = []
        late = False
        for (start, end), language, syntax in _sources(task.text, context):
            source = task.text[start:end]
            if syntax is None:
                late = True
                continue
            if self.bodies:
                bodies += [cut.moved(start) for cut in self._bodies(source, syntax, language, task.question)]
            rest += [cut.moved(start) for cut in self._remarks(source, syntax, language)]
        note = f"{LATE_NOTE}: not all source was parsed, and the rest kept" if late else ""
        chosen = _disjoint(bodies, task.protected)
        gone = [(cut.start, cut.end) for cut in chosen]
        chosen += [cut for cut in _disjoint(rest, task.protected) if not _overlaps((cut.start, cut.end), gone)]
        return Rewrite(_without(task.text, sorted(chosen)).pieces, note)

    def _remarks(self, source: str, syntax: Syntax, language: str) -> "Iterator[_Cut]":
        """Comments and documentation that go."""
        errors = union([*syntax.errors, *_kept(source, syntax, language)])
        for span in syntax.comments:
            comment = source[slice(*span)]
            wanted = self.docstrings if _DOCUMENTS.match(comment) else self.comments
            if wanted and not _DIRECTIVE.search(comment) and not _overlaps(span, errors):
                yield from _comment(source, *span)
        for span in syntax.docs if self.docstrings else ():
            if not _overlaps(span, errors):
                yield _docstring(source, span)

    def _bodies(self, source: str, syntax: Syntax, language: str, question: str) -> "Iterator[_Cut]":
        words = set(_WORD.findall(question))
        asked = union([one.span for one in syntax.functions if not words.isdisjoint(_WORD.findall(one.name))])
        docs = {} if self.docstrings else dict(syntax.docs)
        lines = [newline.start() for newline in _NEWLINE.finditer(source)]
        for function in syntax.functions:
            if not function.broken and not _overlaps(function.span, asked):
                yield from _body(source, function.body, docs, lines, indented=LANGUAGES[language].indented)


@dataclass(frozen=True, slots=True, order=True)
class _Cut:
    """What goes, and what stands in its place."""

    start: int
    end: int
    instead: str = ""

    def moved(self, by: int) -> "_Cut":
        return _Cut(self.start + by, self.end + by, self.instead)


def _sources(text: str, context: CompressionContext) -> Iterator[tuple[Span, str, Syntax | None]]:
    """Where source code stands, its language, and what was parsed in time.

    A language that was only guessed must explain all of a text. Fences count where the text around them is no source
    itself: a program may have Markdown in its strings.
    """
    language, cues, blocks = _looks(text)
    if language is not None:
        language = dialect(language, text)
        syntax = _parsed(text, language, context)
        if syntax is None or not syntax.broken:
            yield (0, len(text)), language, syntax
        if syntax is None or not syntax.broken or cues >= _FEWEST_CUES:
            return
    for (start, end), name in blocks:
        language = dialect(name, text[start:end])
        yield (start, end), language, _parsed(text[start:end], language, context)


def _looks(text: str) -> tuple[str | None, int, list[tuple[Span, str]]]:
    """The language that a text as a whole looks like (None: it does not look like source), by how many lines, and what
    stands within fences that name a language. Nothing is parsed.
    """
    fences = list(_fenced(text))
    around = "".join(_between(text, [block for block, _, _ in fences]))
    if _HUNK.search(around) or foreign(around):
        return None, 0, []
    language, cues = guessed(around)
    known = [(span, own) for _, span, name in fences if span[0] < span[1] and (own := named(name)) is not None]
    return (language if cues >= (1 if fences else _FEWEST_CUES) else None), cues, known


def _fenced(text: str) -> Iterator[tuple[Span, Span, str]]:
    """Fenced blocks, what is in them, and what their fences name."""
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence[1].startswith(opening[1]) and not fence[2]:
            yield (opening.start(), fence.end()), (opening.end() + 1, fence.start()), opening[2]
            opening = None


def _between(text: str, spans: Sequence[Span]) -> Iterator[str]:
    """A text but for some spans, ascending and disjoint."""
    done = 0
    for start, end in [*spans, (len(text), len(text))]:
        yield text[done:start]
        done = end


def _parsed(source: str, language: str, context: CompressionContext) -> Syntax | None:
    return None if context.expired() else syntax_of(source, language, expired=_limit(len(source), context))


def _limit(chars: int, context: CompressionContext) -> Callable[[], bool]:
    """Whether the time for a text of this size is over."""
    began = context.clock()
    most = min(_SECONDS + _PER_CHAR * chars, _OF_THE_TIME * context.remaining())
    return lambda: context.clock() - began > most


def _comment(source: str, start: int, end: int) -> Iterator[_Cut]:
    """A comment with its line where it has it alone, else with the space before it."""
    first = start
    while first and source[first - 1] in " \t":
        first -= 1
    end -= source[end - 1] == "\n"  # some grammars count it in
    after = _LINE_END.match(source, end)
    if after and (not first or source[first - 1] == "\n"):
        # Behind a backslash the line stays, empty: the next one would be the macro's.
        yield _Cut(first, end if source.endswith(("\\\n", "\\\r\n"), 0, first) else after.end())
    elif after and source[first - 1] != "\\":
        yield _Cut(first, end)
    elif not after and "\n" not in source[start:end]:  # else it may end a line for the language
        fused = first == start and first and not source[first - 1].isspace() and not source[end].isspace()
        yield _Cut(first if source[end].isspace() else start, end, " " if fused else "")


def _docstring(source: str, span: Span) -> _Cut:
    """A string that documents, with its line; where nothing else is in its block, what means nothing."""
    start, end = span
    first = source.rfind("\n", 0, start) + 1
    indentation = source[first:start]
    after = _LINE_END.match(source, end)
    if indentation.strip() or not after:
        return _Cut(start, end, "...")
    at = _SPACE.match(source, after.end())
    assert at is not None, "it matches nothing too"
    following = source[source.rfind("\n", 0, at.end()) + 1 : at.end()]
    alone = indentation and (following != indentation or source[at.end() : at.end() + 1] in ("", "#"))
    return _Cut(start, end, "...") if alone else _Cut(first, after.end())


def _body(source: str, body: Span, docs: dict[int, int], lines: Sequence[int], *, indented: bool) -> Iterator[_Cut]:
    """A body, behind its documentation, with a word of how long it was. `lines`: where the source's lines end."""
    start, end = body
    if indented and start in docs:
        documented = docs[start]
        space = _SPACE.match(source, documented)
        assert space is not None, "it matches nothing too"
        start = space.end()
        if "\n" not in source[documented:start]:
            return
    elif not indented:
        if source[start] != "{" or source[end - 1] != "}":
            return
        start, end = start + 1, end - 1
    count = bisect_left(lines, end) - bisect_left(lines, start) + (1 if indented else -1)
    if count >= _FEWEST:
        words = _LEFT_OUT.format(count=count)
        yield _Cut(start, end, f"...  # {words}" if indented else f" /* {words} */ ")


def _kept(source: str, syntax: Syntax, language: str) -> Iterator[Span]:
    """Where comments stay, whatever they say."""
    if language == "go":
        yield from ((0, imported.start()) for imported in _C_IN_GO.finditer(source))
    elif language == "python":
        within = False
        for span in syntax.comments:
            comment = source[slice(*span)]
            within = within or _METADATA.match(comment) is not None
            if within:
                yield span
                within = comment.rstrip() != "# ///"


def _disjoint(cuts: Sequence[_Cut], protected: Sequence[Span]) -> list[_Cut]:
    """The outermost ones, ascending, that touch nothing protected; those within one that does have their turn."""
    chosen: list[_Cut] = []
    for cut in sorted(cuts, key=lambda cut: (cut.start, -cut.end)):
        if (not chosen or cut.start >= chosen[-1].end) and not _overlaps((cut.start, cut.end), protected):
            chosen.append(cut)
    return chosen


def _without(text: str, cuts: Sequence[_Cut]) -> Rewrite:
    """The text without these; ascending and disjoint."""
    pieces: list[Piece] = []
    done = 0
    for cut in cuts:
        pieces += [(done, cut.start), *([cut.instead] if cut.instead else [])]
        done = cut.end
    return Rewrite.of_pieces([*pieces, (done, len(text))])


def _overlaps(span: Span, others: Sequence[Span]) -> bool:
    """Whether a span shares anything with any of others, ascending and disjoint."""
    at = max(bisect_right(others, span[0], key=lambda one: one[0]) - 1, 0)
    return any(start < span[1] and span[0] < end for start, end in others[at : at + 2])
