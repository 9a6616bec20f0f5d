"""Stand-ins for text that a chat template must carry through unseen: pairs of private-use characters, one token each.

A number below 65,536 is written as one character of 256 high digits and one of 256 low digits (plane 15). Text that
contains such characters is itself swapped, so nothing from outside can pose as a sentinel.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..prompt.errors import BadRequest

BASE = 256
HIGH, LOW = 0xF0000, 0xF0000 + BASE
LIMIT = BASE * BASE


def sentinel_tokens() -> list[AddedToken]:
    """The 512 digits as special tokens, for the copy of the tokenizer that reads rendered templates."""
    return [AddedToken(chr(HIGH + digit), special=True, normalized=False) for digit in range(2 * BASE)]


class Sentinels:
    """What must be swapped in text from outside, and how sentinels look in ids. Immutable."""

    def __init__(self, marked: Tokenizer, special_texts: Sequence[str]) -> None:
        by_length = sorted((text for text in special_texts if text), key=len, reverse=True)
        own = f"[{chr(HIGH)}-{chr(LOW + BASE - 1)}]"
        self.lookalike = re.compile("|".join([own, *map(re.escape, by_length)]))
        self.digits = {marked.token_to_id(chr(HIGH + digit)): digit for digit in range(2 * BASE)}
        assert None not in self.digits and len(self.digits) == 2 * BASE, "each sentinel character needs its own id"


class Swaps:
    """The swaps of one request: sentinel number to what it stands for."""

    def __init__(self, sentinels: Sentinels) -> None:
        self._sentinels = sentinels
        self._texts: list[str] = []
        self._marks: dict[int, int] = {}  # sentinel number to the index of its mark
        self._known: dict[str, str] = {}  # look-alike to its sentinel

    def content(self, text: str, marks: Sequence[tuple[int, int, int]]) -> str:
        """`text` with a sentinel for each mark (start, end, index; ascending, disjoint) and each look-alike between."""
        pieces, done = [], 0
        for start, end, index in marks:
            assert done <= start, "marked chunks must not overlap"
            pieces.append(self._plain(text[done:start]))
            self._marks[len(self._texts)] = index
            pieces.append(self._new(text[start:end]))
            done = end
        return "".join([*pieces, self._plain(text[done:])])

    def everywhere(self, value: Any) -> Any:
        """A JSON value with the look-alikes of all its strings swapped, keys included."""
        if isinstance(value, str):
            return self._plain(value)
        if isinstance(value, dict):
            return {self._plain(key): self.everywhere(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.everywhere(item) for item in value]
        return value

    def restored(
        self, ids: Sequence[int], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """`ids` with each sentinel replaced by the ids of its text, and the spans (start, length, mark index)."""
        if not self._texts:
            return list(ids), []
        digits, out, spans, number = self._sentinels.digits, [], [], 0
        for token in ids:
            digit = digits.get(token)
            if digit is None:
                out.append(token)
            elif digit < BASE:
                number = digit * BASE
            else:
                stood_for = number + digit - BASE
                piece = encode(self._texts[stood_for])
                if stood_for in self._marks:
                    spans.append((len(out), len(piece), self._marks[stood_for]))
                out += piece
        return out, spans

    def _plain(self, text: str) -> str:
        return self._sentinels.lookalike.sub(lambda found: self._lookalike(found.group()), text)

    def _lookalike(self, text: str) -> str:
        if text not in self._known:
            self._known[text] = self._new(text)
        return self._known[text]

    def _new(self, text: str) -> str:
        number = len(self._texts)
        if number >= LIMIT:
            raise BadRequest(f"the messages hold more than {LIMIT:,} reusable chunks", param="messages")
        self._texts.append(text)
        return chr(HIGH + number // BASE) + chr(LOW + number % BASE)
