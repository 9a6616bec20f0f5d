"""Tool calls out of an answer's text, as it comes. What turns out to be no call of an offered function stays text."""

from collections.abc import Collection, Sequence
from enum import Enum, auto

from .dialects import Dialect
from .pieces import CallArguments, CallBegun, Part, Said
from .scanner import CallScanner

_PYTHON_TAG = "<|python_tag|>"


class _State(Enum):
    START = auto()  # nothing but white space was read
    TEXT = auto()
    OPEN = auto()  # behind an opening mark, or between two calls: an object must follow
    CALL = auto()
    CLOSE = auto()  # behind a call's object


class ToolParser:
    """Reads one answer. `names` are the functions that may be called, `most` how many calls there may be."""

    def __init__(self, dialect: Dialect, names: Collection[str], *, most: int | None = None) -> None:
        self.calls = 0
        self._dialect = dialect
        self._names = frozenset(names)
        self._most = most
        self._state = _State.START
        self._text = ""  # not read yet
        self._raw = ""  # read since the white space before the opening mark, for the case that this is no call
        self._scanner = CallScanner((), arguments=dialect.arguments)
        self._telling = True
        self._pieces: list[Part] = []

    def feed(self, text: str) -> Sequence[Part]:
        self._text += text
        steps = {
            _State.START: self._start,
            _State.TEXT: self._plain,
            _State.OPEN: self._open,
            _State.CALL: self._call,
            _State.CLOSE: self._close,
        }
        while self._text and steps[self._state]():
            pass
        return self._taken()

    def finish(self) -> Sequence[Part]:
        if self._state is _State.CALL and self._scanner.named is not None:
            self._text = ""  # a call that was cut
        elif self._state is not _State.CLOSE and (self._raw or not self.calls or self._text.strip()):
            self._say(self._raw + self._text)
        return self._taken()

    def _taken(self) -> Sequence[Part]:
        taken, self._pieces = self._pieces, []
        return taken

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Said(text))

    def _start(self) -> bool:
        """An answer's beginning: where the dialect has no opening mark, an object here is a call."""
        head = self._text.lstrip()
        if self._dialect.opening or not (head.startswith("{") or _PYTHON_TAG.startswith(head[: len(_PYTHON_TAG)])):
            self._state = _State.TEXT
            return True
        if not head.startswith(("{", _PYTHON_TAG)):
            return False
        self._state = _State.OPEN
        return True

    def _plain(self) -> bool:
        """Text, up to an opening mark or what may become one, with the white space before it."""
        mark = self._dialect.opening
        at = self._text.find(mark) if mark else -1
        if at >= 0:
            said = self._text[:at].rstrip()
            self._say(said)
            self._raw, self._text = self._text[len(said) : at + len(mark)], self._text[at + len(mark) :]
            self._state = _State.OPEN
            return True
        held = _overlap(self._text, mark)
        shown = self._text[: len(self._text) - held]
        if mark:
            shown = shown.rstrip()
        self._say(shown)
        self._text = self._text[len(shown) :]
        return False

    def _open(self) -> bool:
        skipped = self._skipped("[" if self._dialect.listed else "", tag=not self._dialect.opening)
        if not skipped:
            return False
        if not self._text.startswith("{"):
            return self._no_call()
        self._raw += "{"
        self._text = self._text[1:]
        self._scanner = CallScanner(self._names, arguments=self._dialect.arguments)
        self._state = _State.CALL
        return True

    def _skipped(self, sign: str, *, tag: bool) -> bool:
        """Go over white space, a sign and a tag that may stand here; False where the text ends before what follows."""
        rest = self._text.lstrip()
        if sign:
            rest = rest.removeprefix(sign).lstrip()
        if tag and rest != _PYTHON_TAG and _PYTHON_TAG.startswith(rest):
            return False
        if tag:
            rest = rest.removeprefix(_PYTHON_TAG).lstrip()
        if not rest:
            return False
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest
        return True

    def _call(self) -> bool:
        begins = self._scanner.named is None
        end = self._scanner.feed(self._text, 0)
        self._raw += self._text[:end]
        self._text = self._text[end:]
        if self._scanner.named is None:
            return self._no_call() if self._scanner.failed else True
        if begins:
            self._telling = self._most is None or self.calls < self._most
        if self._telling:
            self._tell(begins=begins)
        if self._scanner.done or self._scanner.failed:
            self._raw, self._state = "", _State.CLOSE
        return True

    def _tell(self, *, begins: bool) -> None:
        if begins:
            assert self._scanner.named is not None
            self._pieces.append(CallBegun(self.calls, self._dialect.new_id(), self._scanner.named))
            self.calls += 1
        more = self._scanner.take()
        if more:
            self._pieces.append(CallArguments(self.calls - 1, more))

    def _no_call(self) -> bool:
        self._say(self._raw)
        self._raw, self._state = "", _State.TEXT
        return True

    def _close(self) -> bool:
        """Behind a call: its closing mark, or what separates it from the next one."""
        rest, mark = self._text.lstrip(), self._dialect.closing
        if mark:
            if not rest.startswith(mark) and mark.startswith(rest):
                return False
            self._text, self._state = rest.removeprefix(mark), _State.TEXT
            return True
        if not rest:
            return False
        if rest[0] in ",;":
            self._text, self._state = rest[1:], _State.OPEN
        else:
            self._text, self._state = rest.removeprefix("]"), _State.TEXT
        return True


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
