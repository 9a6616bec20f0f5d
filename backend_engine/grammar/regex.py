"""How large a regular expression is once its counted repetitions are written out: `(a{100}){100}` has 10,000 parts.

Automata are built while a model generates, in the engine's thread, so what would explode there is refused before.
"""

import re

from ...prompt.errors import BadRequest

MAX_PARTS = 20_000

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d{1,9})(?:,(\d{0,9}))?\}|.", re.DOTALL)


def check_regex(pattern: str, *, param: str) -> None:
    """Raise BadRequest if `pattern` has too many parts; its syntax is the compiler's to check."""
    parts = regex_parts(pattern)
    if parts > MAX_PARTS:
        message = f"{param}: with its repetitions written out the regular expression has {parts} parts"
        raise BadRequest(f"{message}; the most is {MAX_PARTS}", param=param, code="invalid_value")


def regex_parts(pattern: str) -> int:
    """Characters and classes of a pattern, each counted as often as its repetitions ask for at most."""
    totals, last = [0], 0  # one total per open group
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if text == "(":
            totals.append(0)
            last = 0
        elif text == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif piece[1] is not None:
            times = max(int(piece[1]), int(piece[2] or 0), 1)
            totals[-1] += last * (times - 1)
            last *= times
        else:
            totals[-1] += 1
            last = 1
    return sum(totals)
