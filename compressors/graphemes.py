"""Characters as a reader sees them: a letter or a symbol with its marks, an emoji of several, a digit in a keycap.

The rules for extended grapheme clusters (Unicode's UAX #29), told from the two code points at a border alone; in doubt
nothing is parted.
"""

import re
import unicodedata

# Below it nothing belongs to what stands before it, but a line feed to its carriage return.
_FIRST_MARK = "\u0300"
# What has no marks: "Cf" is left out, as joiners and tags are of it.
_CONTROLS = frozenset({"Cc", "Zl", "Zp"})
_VIRAMA = 9
# Beside the categories of marks: joiners, Thai and Lao AM, later jamo, half-width voice marks, skin tones, tags.
_EXTENDING = "\u0e33\u0eb3\u1160-\u11ff\u200c\u200d\ud7b0-\ud7fb\uff9e\uff9f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f"
_PREPENDED = (
    "\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e\U000110bd\U000110cd\U000111c2\U000111c3\U00011f02"
    "\U0001193f\U00011941\U00011a3a\U00011a84-\U00011a89\U00011d46"
)
_FIRST_JAMO, _HANGUL, _FLAG = (
    "\u1100-\u115f\ua960-\ua97c",
    "\u1100-\u11ff\ua960-\ua97c\uac00-\ud7fb",
    "\U0001f1e6-\U0001f1ff",
)
_TOGETHER = re.compile(
    rf"[{_PREPENDED}].|.[{_EXTENDING}]|\u200d[^\x00-\x7f]|[{_FLAG}]{{2}}|[{_FIRST_JAMO}][{_HANGUL}]", re.DOTALL
)


def parted(text: str, at: int) -> bool:
    """Whether a border before `text[at]` would part a character; never at the ends of the text."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if before < _FIRST_MARK and after < _FIRST_MARK:
        return before == "\r" and after == "\n"
    if unicodedata.category(before) in _CONTROLS or unicodedata.category(after) in _CONTROLS:
        return False
    return (
        unicodedata.category(after).startswith("M")
        or (unicodedata.combining(before) == _VIRAMA and after.isalpha())
        or _TOGETHER.match(text, at - 1) is not None
    )


def start_of(text: str, at: int) -> int:
    """The last place up to `at` where a border parts no character."""
    while parted(text, at):
        at -= 1
    return at


def end_of(text: str, at: int) -> int:
    """The first place from `at` on where a border parts no character."""
    while parted(text, at):
        at += 1
    return at
