"""Text that no lossy step may touch: code, JSON, URLs, identifiers, numbers, dates, quotations. Found by compiled
regular expressions, in linear time (every repeat is possessive or bounded, and every pattern begins where a word
begins).

Patterns see ASCII words only, so that identifiers inside Chinese or Arabic text end where the other script begins.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from .blocks import AS_IT_IS, REFERENCE, LineKind, lines_of
from .graphemes import end_of, start_of
from .jsonscan import documents
from .result import Span
from .spans import union
from .structure.marks import marked_spans

CATEGORIES = frozenset({"code", "json", "table", "url", "email", "identifier", "number", "date", "quote"})
"""What can be protected. `code` is also grep output, diffs, traces and inline code; `identifier` is also paths, hashes,
versions, tags and special-token look-alikes."""

SCAN_SPEED = 400_000.0
"""Characters a second that finding protected text and sentences takes at worst on one slow core; for deadlines."""

KEEP, END_KEEP = "<keep>", "</keep>"
"""Marks in a text: no lossy step touches what stands between them, nor the marks. Without its end, all that follows."""

_BROKEN_JSON = 16
_TRAILING = ".,;:!?'\"*"

_MONTH = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    "|Nov(?:ember)?|Dec(?:ember)?)"
)
_UNIT = (
    r"(?:%|‰|°[CFK]?|[µμnmcdkKMGT]?(?:m|g|l|L|s|W|Wh|V|A|Hz|B|b|iB|bps|Pa|J|N)(?:/[a-zA-Z]{1,4}|[²³23])?|min|h|hrs?|hours?"
    r"|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|years?|inch(?:es)?|in|ft|feet|miles?|mph|yd|lbs?|oz|kcal|cal"
    r"|percent|per cent|pp|bps|tokens?|bytes?|bits?|px|pt|em|rem|dpi|fps|rpm|ppm|dB|mol|ha|acres?"
    r"|million|billion|trillion|thousand|hundred|dozen|[kKMB]n?|USD|EUR|GBP|JPY|CNY|INR|CHF|dollars?|euros?|pounds?|cents?"
    r"|st|nd|rd|th)(?![A-Za-z0-9])"
)
_CJK_UNIT = "[年月日号時时分秒歳岁个個人次元円圆万萬亿億千百兆度米克吨倍折％%‰℃㎡]{1,3}"
_DIGIT = "[0-9٠-٩۰-۹०-९０-９]"
_MONEY = "[$€£¥₹₩₽￥฿₺]"

_URL = r"(?:[A-Za-z][A-Za-z0-9+.-]{1,15}://|www\.|mailto:|data:[\w/+.-]{1,60}[;,])[^\s<>\"`，。）」]++"

# Each pattern is named after its category; where two match at one place the first wins.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("code", r"(?<!`)(?P<tick>`{1,3})(?!`)[^`\n]{1,500}+(?P=tick)(?!`)"),
    ("url", r"!?\[[^\[\]\n]{0,200}\]\([^()\s]{1,500}+(?:[ ]\"[^\"\n]{0,100}\")?\)"),
    ("url", rf"(?<![A-Za-z0-9_])_{{0,2}}{_URL}"),
    ("email", r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"), ("identifier",
    r"<[|/!?]?[A-Za-z][^<>\n]{0,300}>|\[/?(?:INST|SYS)\]"), ("identifier",
    r"(?<![\w-])[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}(?![\w-])"), (
        "date",
        r"\d{1,4}年(?:\d{1,2}月(?:\d{1,2}[日号號])?)?|\d{1,2}月\d{1,2}[日号號]"
        r"|(?<![\w.])(?:\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[ ]?[+-]\d{2}:?\d{2})?)?"
        r"|\d{1,4}[/.]\d{1,2}[/.]\d{1,4}|\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d{1,6})?(?:[ ]?[AaPp]\.?[Mm]\b\.?)?"
        r"|\d{1,2}[ ]?[AaPp][Mm]"
        rf"|{_MONTH}\.?[ ]\d{{1,2}}(?:st|nd|rd|th)?(?:,?[ ]\d{{4}})?|{_MONTH}[ ]\d{{4}}"
        rf"|\d{{1,2}}(?:st|nd|rd|th)?(?:[ ]of)?[ ]{_MONTH}\b(?:,?[ ]\d{{4}})?)(?!\w)",
    ),
    (
        "number",
        rf"(?<![\w.])(?:[-+−±~≈<>≤≥]?{_MONEY}[ ]?|(?:USD|EUR|GBP|US)[ ]?\$?[ ]?|[-+−±~≈])?{_DIGIT}"
        rf"(?:(?:[.,٫٬'’]|[-–/:]{_MONEY}?)?{_DIGIT}){{0,60}}(?:[eE][+-]?\d{{1,4}})?"
        rf"(?:[ ]?[-–]?{_UNIT}|{_CJK_UNIT}|[ ]?%)?(?![\w])",
    ),
    # Paths, snake_case, dotted and camelCase names, flags, variables, versions, anything with letters and digits mixed.
    ("identifier", r"(?<![\w/.~\\-])(?:[A-Za-z]:|~|\.{1,2})?[/\\](?:[\w.@+~%-]++[/\\]?)++"),
    ("identifier", r"(?<![\w/.@+~-])[\w.@+~-]++(?:/[\w.@+~%-]++)++/?"),
    ("identifier", r"(?<![\w-])--?[A-Za-z_][\w-]++(?:=\S{1,200}+)?|[$@\#]\{?[A-Za-z_0-9][\w.-]*+\}?"),
    ("identifier", r"(?<![\w.])(?<!\w[:-])(?<!--)(?=\w)"
                   r"(?=[\w.:-]{0,200}?(?:_|[a-z][A-Z]|[A-Za-z][0-9]|[0-9][A-Za-z]|\w\.\w|\w::\w))"
                   r"\w++(?:(?:\.|::?|-{1,4})\w++)*+(?:\(\))?"),
    ("identifier", r"(?<![\w+/=])(?=[A-Za-z0-9]{0,63}[0-9+/=])[A-Za-z0-9+/]{64,}+={0,2}"),
    # An escape of a control character or a placeholder such as {name}.
    ("identifier", r"\{\{?[\w.]{1,60}\}?\}|%\(?[\w]{0,30}\)?[sdfr](?!\w)"),
    ("quote", r"\"(?=\S)[^\"\n]{1,300}+\"|“[^“”\n]{1,300}+”|«[^«»\n]{1,300}+»|„[^„“”\n]{1,300}+[“”]"
              r"|「[^「」\n]{1,300}+」|『[^『』\n]{1,300}+』|《[^《》\n]{1,300}+》"
              r"|‘[^‘’\n]{1,80}+’(?!\w)|(?<![\w'])'(?=\S)[^'\n]{1,80}+'(?!\w)"),
)  # fmt: skip


def _compiled(categories: frozenset[str]) -> re.Pattern[str]:
    chosen = [pattern for name, pattern in _PATTERNS if name in categories]
    return re.compile("|".join(f"(?:{pattern})" for pattern in chosen) or r"(?!)", re.ASCII)


_ALL = _compiled(CATEGORIES)
_URL_BEHIND = re.compile(rf"(?<=_){_URL}", re.ASCII)  # a name with an underscore is found first and ends inside it
_REMARK = re.compile(
    r"\{(?:comment|cough|crosstalk|disfmarker|gap|inaudible|laugh(?:s|ter|ing)?|noise|nonvocalsound|pause|silence"
    r"|unintelligible|vocalsound)\}"
)
_REMARKED = 3  # times that such a word stands in a text where it is no placeholder, which has its place once or twice
_KEPT = re.compile(rf"{KEEP}.*?(?:{END_KEEP}|\Z)", re.DOTALL)
_REFERENCE = re.compile(rf"^{REFERENCE}", re.MULTILINE)


def protected_spans(text: str, *, categories: Iterable[str] = CATEGORIES) -> tuple[Span, ...]:
    """The spans of `text` that must survive verbatim: ascending, disjoint, with at least a gap of one character.

    References to repeated blocks, what structure/ has written shorter, and what stands between the marks KEEP and
    END_KEEP, are always among them.
    """
    wanted = frozenset(categories)
    assert wanted <= CATEGORIES, f"unknown categories {sorted(wanted - CATEGORIES)}"
    found: list[Span] = [match.span() for pattern in (_REFERENCE, _KEPT) for match in pattern.finditer(text)]
    found += marked_spans(text)
    if wanted & {"code", "table"}:
        found += _line_spans(text, wanted)
    if "json" in wanted:
        found += documents(text, broken_from=_BROKEN_JSON)
    pattern = _ALL if wanted == CATEGORIES else _compiled(wanted)
    if "url" in wanted:
        found += (_trimmed(text, match.span()) for match in _URL_BEHIND.finditer(text))
    found += _without_remarks(text, [_trimmed(text, match.span()) for match in pattern.finditer(text)])
    return union((start_of(text, start), end_of(text, end)) for start, end in union(found))


def _without_remarks(text: str, spans: Sequence[Span]) -> Iterable[Span]:
    """Without what somebody who wrote speech down put in, such as {laughter}: words for what is heard that stand there
    again and again, between white space every time. Once or twice, or as part of something, they are placeholders.
    """
    remarks = {span: text[slice(*span)] for span in spans if _REMARK.fullmatch(text, *span)}
    if not remarks:
        return spans
    often = {word for word, times in Counter(remarks.values()).items() if times >= _REMARKED}
    often -= {word for (start, end), word in remarks.items() if text[max(0, start - 1) : end + 1].split() != [word]}
    return [span for span in spans if remarks.get(span) not in often]


def _line_spans(text: str, wanted: frozenset[str]) -> Iterable[Span]:
    kinds = {*(AS_IT_IS if "code" in wanted else ()), *((LineKind.TABLE,) if "table" in wanted else ())}
    start: int | None = None
    end = 0
    for line in lines_of(text):
        if line.kind in kinds:
            start = line.start if start is None else start
            end = line.end
        elif start is not None and line.kind is not LineKind.BLANK:
            yield start, end
            start = None
    if start is not None:
        yield start, end


def _trimmed(text: str, span: Span) -> Span:
    """Without the sentence's own punctuation at the end, and without its opening mark when only that is left open."""
    start, end = span
    if text[end - 1] not in _TRAILING or text[start] in "`\"'“‘«„":
        return span
    while end > start + 1 and text[end - 1] in _TRAILING:
        end -= 1
    return start, end
