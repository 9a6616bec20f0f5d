"""From a request's token ids to the text that may be shown: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from typing import Protocol


class TokenStream(Protocol):
    """Incremental decoding of one generation; holds back the bytes of an unfinished character."""

    def push(self, token_id: int) -> str: ...


class TextDecoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def stream(self) -> TokenStream: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class StopMatcher:
    """Finds the stop string that is complete first, wherever the pieces of text are cut; of several, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what is safe to show now, and whether a stop string was found (nothing follows)."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            end, start = min(found)
            self._held, self.found = "", text[start:end]
            return text[:start], True
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back; the text has ended."""
        held, self._held = self._held, ""
        return held


class Detokenizer:
    """One generation's text. `push` each token, then `flush` once unless a stop string ended it.

    In the text of the first `unstopped` tokens no stop string is looked for. `after` are ids that the text goes on
    from; they are not part of it.
    """

    def __init__(
        self, decoder: TextDecoder, *, stops: Sequence[str] = (), unstopped: int = 0, after: Sequence[int] = ()
    ) -> None:
        self._decoder = decoder
        self._stream = decoder.stream()
        self._matcher = StopMatcher(stops)
        self._unstopped = unstopped
        self._shown: list[
            int
        ] = []  # the ids of the last piece of text, the context in which the pending ones are decoded
        self._pending: list[int] = []
        for token_id in after:
            self._stream.push(token_id)
            self._shown.append(token_id)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.found

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that is safe to show after this token, and whether a stop string was completed."""
        self._pending.append(token_id)
        self._unstopped -= 1
        text = self._stream.push(token_id)
        if not text:
            return "", False
        self._shown, self._pending = self._pending, []
        return (text, False) if self._unstopped >= 0 else self._matcher.push(text)

    def flush(self) -> str:
        """The rest: what might have begun a stop string, and whole characters that came with an unfinished one."""
        before = self._decoder.decode(self._shown)
        after = self._decoder.decode(self._shown + self._pending).rstrip("\N{REPLACEMENT CHARACTER}")
        rest = after[len(before) :] if after.startswith(before) else ""
        if self._unstopped >= 0:
            return rest
        rest, stopped = self._matcher.push(rest)
        return rest if stopped else rest + self._matcher.flush()


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
