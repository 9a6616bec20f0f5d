"""Small words that turn a sentence round: negations, modals, and/or. Token pruning keeps them, and what they govern.

A list, not a parser: some languages, and in doubt a word too many.
"""

import re
from collections.abc import Iterator

from .result import Span

# Words after which the next word must stay too.
_GOVERNING = (
    "not no never none nor neither cannot without unless except only must shall should may might can could will would"
    " ought if until before after least most more less fewer than"
    " nicht kein keine keinen keiner nie niemals ohne außer nur muss müssen soll sollen sollte darf dürfen kann können"
    " wenn ne pas jamais sans sauf aucun aucune seulement doit doivent peut peuvent devrait si"
    " nunca jamás sin excepto solo sólo debe deben puede pueden debería não sem exceto deve devem pode podem se"
    " non mai senza tranne solo deve devono può possono"
    " не нет ни никогда без кроме только должен должна должны может могут если"
    " لا لم لن ليس ليست غير بدون إلا فقط يجب يمكن قد إذا"
)
_JOINING = "and or but either both and/or und oder aber sowie et ou mais y o pero e ma и или но أو ثم لكن"
_CONTRACTED = r"[A-Za-z]{2,8}n['’]t"
# Chinese and Japanese have no spaces: (term, characters before it, characters after it) that must stay.
_CJK = (
    (r"不得|不能|不要|不会|不是|没有|沒有|并非|禁止|必须|必須|应该|應該|不应|不應|可以|只能|除非|如果|除了", 0, 2),
    (r"[不没沒无無未非别別勿莫]", 0, 1),
    (r"[和与與或及且]", 0, 0),
    (r"ません|ないで|なければ|なかった|ない|べき|できる|できない|たら|れば", 2, 0),
)


def _words(text: str) -> str:
    return "|".join(sorted(map(re.escape, dict.fromkeys(text.split())), key=len, reverse=True))


_GOVERNS = re.compile(rf"(?<!\w)(?=\w)(?:{_words(_GOVERNING)}|{_CONTRACTED})(?!\w)", re.IGNORECASE)
_JOINS = re.compile(rf"(?<!\w)(?=\w)(?:{_words(_JOINING)})(?!\w)", re.IGNORECASE)
_CJK_PATTERNS = tuple((re.compile(pattern), before, after) for pattern, before, after in _CJK)
_HAS_CJK = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")


def governing(text: str) -> Iterator[Span]:
    """Words that must stay together with the word after them."""
    return (match.span() for match in _GOVERNS.finditer(text))


def joining(text: str) -> Iterator[Span]:
    """Conjunctions, which must stay between what they join; also where they are but a part of a word (O'Brien)."""
    return (match.span() for match in _JOINS.finditer(text))


def bound(text: str) -> Iterator[Span]:
    """CJK negations and modals with their verbs: characters that must stay together."""
    if _HAS_CJK.search(text):
        for pattern, before, after in _CJK_PATTERNS:
            for match in pattern.finditer(text):
                yield max(0, match.start() - before), min(len(text), match.end() + after)
