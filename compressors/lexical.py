"""Relevance by words alone: BM25 of texts for a question, and vectors of hashed words. No model, some milliseconds.

Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond"; hashed vectors as Weinberger et
al. 2009, "Feature Hashing for Large Scale Multitask Learning".
"""

import itertools
import math
import operator
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from .mmr import Floats

_K1, _B = 1.2, 0.75
_DIM = 256


def _ranges(points: Iterable[int]) -> str:
    """Ascending code points for a character class."""
    runs: list[list[int]] = []
    for point in points:
        if runs and runs[-1][1] == point - 1:
            runs[-1][1] = point
        else:
            runs.append([point, point])
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in runs)


# Marks without which a word is the same one: vowels of Hebrew and Arabic, variants of a character's shape.
_LEFT_OUT = (*range(0x0590, 0x0700), *range(0x08C0, 0x0900), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
_DROPPED = re.compile(f"[{_ranges(point for point in _LEFT_OUT if unicodedata.category(chr(point)) == 'Mn')}]+")
# What vowels are written with, and consonants without one, in the scripts of India, Thailand and others.
# The blocks that have no such signs, most of all, take long to look through.
_SIGN_BLOCKS = (*range(0x0300, 0x1E00), *range(0xA660, 0xAC00), *range(0x10A00, 0x12000), *range(0x1E000, 0x1EA00))
_SIGNS = _ranges(point for point in _SIGN_BLOCKS if unicodedata.category(chr(point)) in ("Mn", "Mc"))
_PART = rf"[^\W_]++(?:(?![\x00-\x7f])[{_SIGNS}]++[^\W_]*+)*+"
_WORD = re.compile(f"{_PART}(?:'{_PART})?")
_SIGNED_SCRIPT = re.compile("[\u0e00-\u17ff]")  # of those without spaces: Thai, Lao, Burmese, Khmer
_SIGNED = re.compile(f".[{_SIGNS}]*+")
_ELIDED = re.compile(r"(?:[cdjlmnst]|qu|un|(?:a|da|de|ne|su)ll)'")
# Scripts without spaces between words: two characters in a row are a term.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)
_ENDINGS = ("ings", "ing", "ed", "es", "s", "e")
# Words of questions that say nothing of what is asked about.
_EMPTY = (
    "a an the this that these those i you he she it we they me him her us them my your his its our their who whom"
    " whose what which when where why how is are was were be been being am do does did done has have had having"
    " will would shall should can could may might must to of in on at by for from with about into as and or not no"
    " if then than there here any some much many more most tell say give please der die das den dem des ein eine"
    " einen einem einer ich du er sie es wir ihr mein dein sein wer wen wem welche welcher welches wann wo warum"
    " wie ist sind war waren wird werden wurde hat haben kann können zu von im auf bei für mit über und oder nicht"
    " le la les un une de je tu il elle nous vous ils elles mon ma mes son sa ses qui que quoi quel quelle quand"
    " où pourquoi comment est sont était ont peut à au aux en dans sur pour par avec et ou ne pas el los las una"
    " uno yo él ella su sus quién qué cuál cuándo dónde cómo fue era ha puede del al por para con y o lo gli chi"
    " che quale quando dove perché come è sono può di da nel per"
    " в во на с со к о об у из от до для по за и или а но не как что кто где когда почему зачем сколько какой какая"
    " какое какие это этот эта эти он она оно они я ты вы мы его её их был была было были есть ли бы"
    " في من على إلى الى عن مع هل ما ماذا متى أين اين كيف لماذا كم هو هي هذا هذه ذلك تلك التي الذي أن إن كان كانت"
    " و أو لا لم قد"
    # Too short for what was elided to be cut off.
    " j'ai l'a l'on m'a n'a t'a d'un qu'en qu'il qu'on qu'un s'il c'è com'è cos'è dov'è"
    " i'm cannot"
)
_CONTRACTED = {
    "n't": "ai are ca could did do does had has have is might must need sha should was were wo would",
    "'re": "how that there these they those we what when where who why you",
    "'ve": "could i might must should that they we what who would you",
    "'ll": "he how i it she that there they this we what who you",
    "'d": "he how i it she that there they we what where who why you",
}
# The same in pairs of characters, and in single ones beside another script.
_EMPTY_PAIRS = (
    "です ます まし した すか たか して する ある いる から まで こと もの この その なに どこ いつ だれ どの どう なぜ"
    " いく くら ので とは には では は が を に で と も の か へ や"
    " 什么 什麼 么时 时候 是什 的是 谁是 是谁 哪里 哪个 怎么 么样 怎样 为什 多少 如何 是否 了吗 的吗 吗 呢 的 是 了 在"
    " 和 有 我 你 他 她 它"
)
_ASKED = 12  # words that come once, at most, are what a question can ask
_STRIDE = 4096  # terms between two looks at the clock
_STEM = 3  # letters that stay at least


def terms(text: str) -> list[str]:
    """The words of a text; pairs of characters, with their vowel signs, where no spaces are written.

    Case is folded; common English endings, elided articles and vowel marks of Arabic and Hebrew are left out.
    """
    return list(_terms(text))


def _folded(text: str) -> str:
    """With case, compatible and composed characters folded: every term of a text is a piece of this."""
    if text.isascii():
        return text.casefold()
    return _DROPPED.sub("", unicodedata.normalize("NFKC", text).casefold()).replace("’", "'").replace("ʼ", "'")


def _terms(text: str) -> Iterator[str]:
    for match in _WORD.finditer(_folded(text)):
        word = match[0]
        if "'" in word:
            word = _bare(word)
        if word.isascii():
            yield _stem(word)
            continue
        at = 0
        for run in _UNSPACED.finditer(word):
            if run.start() > at:
                yield word[at : run.start()]
            chars = run.group()
            letters = _SIGNED.findall(chars) if _SIGNED_SCRIPT.search(chars) else chars
            yield from map(operator.add, letters, letters[1:]) if len(letters) > 1 else letters
            at = run.end()
        if at < len(word):
            yield word[at:]


def _bare(word: str) -> str:
    """Without a genitive's ending, or an article and the like before a vowel (French, Italian)."""
    word = word.removesuffix("'s")
    elided = _ELIDED.match(word)
    return word[elided.end() :] if elided and len(word) - elided.end() >= _STEM else word


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if len(word) - len(ending) >= _STEM and word.endswith(ending):
            return word[: -len(ending)]
    return word


_NOTHING = frozenset(
    itertools.chain(
        *map(_terms, (_EMPTY, _EMPTY_PAIRS)),
        *(_terms(word + ending) for ending, words in _CONTRACTED.items() for word in words.split()),
    )
)


def shared_with(question: str) -> Callable[[str], frozenset[str]]:
    """Which terms of a question, stop words aside, a text has. Quick where it has none."""
    asked = frozenset(_terms(question)) - _NOTHING

    def shared(text: str) -> frozenset[str]:
        folded = _folded(text)
        # A term is a piece of a word, so that most texts need not be cut into words.
        return asked.intersection(_terms(text)) if any(term in folded for term in asked) else frozenset()

    return shared


def _bags(texts: Iterable[str], expired: Callable[[], bool]) -> Iterator[Counter[str]]:
    for text in texts:
        bag: Counter[str] = Counter()
        found = _terms(text)
        while some := list(itertools.islice(found, _STRIDE)):
            if expired():
                return
            bag.update(some)
        yield bag


class Words:
    """Texts as bags of words: all of them, or the first ones, until `expired` says that time is over."""

    def __init__(self, texts: Iterable[str], *, expired: Callable[[], bool] = lambda: False) -> None:
        self._bags = list(_bags(texts, expired))
        self._sizes = np.array([sum(bag.values()) for bag in self._bags], dtype=np.float32)
        self._in = Counter(term for bag in self._bags for term in bag)

    def idf(self, term: str, *, least: int = 0) -> float:
        """How rare a term is among the texts, where it is taken to stand in `least` of them; never negative."""
        count = max(least, self._in[term])
        return math.log(1.0 + (len(self._bags) - count + 0.5) / (count + 0.5))

    def known(self, question: str) -> float:
        """The share of a question's words that the texts have, rare ones counting more; 0 if it has no words."""
        asked = set(_terms(question)) - _NOTHING
        everything = sum(self.idf(term) for term in asked)
        return sum(self.idf(term) for term in asked if term in self._in) / everything if everything else 0.0

    def told(self, question: str) -> Floats:
        """The share of a question's words, stop words aside, that each text has, [texts], from 0 to 1.

        Rare ones count more; one that no text has counts as one that comes once. Of a long question a dozen such words
        count as all: what is asked stands in a few of them.
        """
        asked = {term: self.idf(term, least=1) for term in set(_terms(question)) - _NOTHING}
        if not asked or not self._bags:
            return np.zeros(len(self._bags), dtype=np.float32)
        everything = min(math.fsum(asked.values()), _ASKED * self.idf("", least=1))
        # Most texts have few of a long question's words. `fsum`: sets have another order in every process.
        found = (math.fsum(asked[term] for term in asked.keys() & bag.keys()) for bag in self._bags)
        return np.minimum(np.fromiter(found, np.float32, len(self._bags)) / np.float32(everything), np.float32(1.0))

    def bm25(self, question: str, *, stop_words: bool = True) -> Floats:
        """The score of each text, [texts]; 0 where no word is shared, none but stop words if these do not count."""
        asked = sorted(set(_terms(question)) - (frozenset() if stop_words else _NOTHING))
        average = float(self._sizes.mean()) if len(self._sizes) else 0.0
        length = 1.0 - _B + _B * self._sizes / max(average, 1.0)
        scores = np.zeros(len(self._bags), dtype=np.float32)
        for term in asked:
            if term in self._in:
                found = np.array([bag[term] for bag in self._bags], dtype=np.float32)
                scores += self.idf(term) * found * (_K1 + 1.0) / (found + _K1 * length)
        return scores

    def vectors(self) -> Floats:
        """For likeness among the texts: [texts, dim], not normalized."""
        vectors = np.zeros((len(self._bags), _DIM), dtype=np.float32)
        places: dict[str, tuple[int, float]] = {}
        for row, bag in enumerate(self._bags):
            for term, count in bag.items():
                if term not in places:
                    digest = zlib.crc32(term.encode("utf-8", "surrogatepass"))
                    places[term] = digest % _DIM, self.idf(term) * (1.0 if digest & 0x10000 else -1.0)
                at, weight = places[term]
                vectors[row, at] += weight * (1.0 + math.log(count))
        return vectors
