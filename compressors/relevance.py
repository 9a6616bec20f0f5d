"""How relevant units are to the question: by words (BM25), by meaning (an embedder), or read by a cross-encoder."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from .context import CompressionContext
from .lexical import Words
from .mmr import Floats, mmr_order, normalized
from .units import Units

_log = logging.getLogger(__name__)

_FIRST_BATCH, _BATCH = 16, 64
_KNOWN = 0.2  # of what is asked: with fewer of its words in a text, words say little about what answers
_HEADING = 200  # characters of a heading count for what stands under it
_OF_DOCUMENT = 0.3  # of its best unit's score goes to each unit of a segment


@dataclass(frozen=True)
class Judged:
    """The first units, as many as there was time for: `relevance` [seen], and `vectors` [seen, dim], normalized, for
    likeness among them.
    """

    vectors: Floats
    relevance: Floats

    @property
    def seen(self) -> int:
        return len(self.relevance)

    def best_first(
        self, free: Sequence[int], keep: Sequence[bool], *, redundancy: float, enough: Callable[[int], bool]
    ) -> list[int]:
        """Units of `free` by maximal marginal relevance beside those that stay, until `enough` says so of the one just
        added.
        """
        rows = sorted({*free, *(i for i in range(self.seen) if keep[i])})
        order = mmr_order(
            self.vectors[rows],
            self.relevance.astype(np.float32)[rows],
            taken=[k for k, i in enumerate(rows) if keep[i]],
            redundancy=redundancy,
            enough=lambda k: enough(rows[k]),
        )
        return [rows[k] for k in order]


def judge(units: Units, context: CompressionContext, *, by: str, model: str) -> Judged:
    """The units judged `by` an option of `Extractive.relevance`; `model` is the cross-encoder's folder.

    Fewer than all where the next would not be ready in time. "meaning" needs an embedder and raises what it raises.
    """
    if by == "meaning":
        return _by_meaning(units, context)
    words = _words(units, context)
    if by == "cross_encoder" and units.question:
        return _by_reading(units, words, context, model=model)
    if by == "auto" and context.embed is not None and units.question and words.known(units.question) < _KNOWN:
        judged = _by_meaning_if_any(units, context)
        if judged is not None and (judged.seen == len(units) or context.expired()):
            return judged  # what was not judged when the time was over stays
    return _by_words(units, words)


def _words(units: Units, context: CompressionContext) -> Words:
    """The units as bags of words, as far as there is time: vectors and the choice take about as long each."""
    began = context.clock()
    texts = (_in_context(units, i) for i in range(len(units)))
    return Words(texts, expired=lambda: context.remaining() <= 2.0 * (context.clock() - began))


def _in_context(units: Units, i: int) -> str:
    """A unit with the heading that it stands under, which often names what the unit calls "it"."""
    above = units.above[i]
    return units.texts[i] if above is None else f"{units.texts[above][:_HEADING]} {units.texts[i]}"


def _by_words(units: Units, words: Words) -> Judged:
    vectors = normalized(words.vectors())
    scores = words.bm25(units.question)
    if not scores.any():
        return Judged(vectors, _centrality(vectors))
    for numbers in units.segments:
        own = scores[numbers.start : numbers.stop]
        if len(own):
            own += _OF_DOCUMENT * own.max()
    return Judged(vectors, scores / scores.max())


def _by_meaning(units: Units, context: CompressionContext) -> Judged:
    embed = context.embed
    assert embed is not None
    asked = normalized(embed([units.question])) if units.question else None
    rows = list(_in_batches(units.texts, lambda texts: normalized(embed(texts)), context))
    vectors = np.concatenate(rows) if rows else np.zeros((0, 1), dtype=np.float32)
    return Judged(vectors, _centrality(vectors) if asked is None or not rows else vectors @ asked[0])


def _by_meaning_if_any(units: Units, context: CompressionContext) -> Judged | None:
    """None where the embedder cannot be had: words say less, but something."""
    try:
        return _by_meaning(units, context)
    except Exception as error:  # noqa: BLE001 - an embedder may raise anything; it is logged
        _log.warning("no embedder for extractive, which goes by words: %s", type(error).__name__)
        return None


def _by_reading(units: Units, words: Words, context: CompressionContext, *, model: str) -> Judged:
    """The best unit counts 1, the worst 0. Likeness is by words."""
    from .cross_encoder import cross_encoder  # imports torch

    vectors = normalized(words.vectors())
    reader = cross_encoder(model, seconds=context.remaining())
    if reader is None:
        return Judged(vectors[:0], np.zeros(0, dtype=np.float32))
    texts = units.texts[: len(vectors)]
    rows = list(_in_batches(texts, partial(reader.scores, units.question), context, turn=reader.turn))
    scores = by_order(np.concatenate(rows)) if rows else np.zeros(0, dtype=np.float32)
    return Judged(vectors[: len(scores)], scores)


def by_order(scores: Floats) -> Floats:
    """Scores, [units], from 0 to 1, the best; what the model gave no number counts as the worst."""
    known = np.isfinite(scores)
    if not known.any():
        return np.zeros_like(scores)
    least = scores[known].min()
    scores = np.where(known, scores, least)
    return (scores - least) / max(float(np.ptp(scores)), 1e-9)


def _centrality(vectors: Floats) -> Floats:
    """Nearness to the middle of all, [n], for where nobody asks."""
    return vectors @ normalized(vectors.mean(axis=0, keepdims=True))[0] if len(vectors) else np.zeros(0, np.float32)


def _in_batches(
    texts: Sequence[str],
    judged: Callable[[Sequence[str]], Floats],
    context: CompressionContext,
    *,
    turn: Callable[[float], AbstractContextManager[bool]] = lambda seconds: nullcontext(True),
) -> Iterator[Floats]:
    """What `judged` says of the texts, batch by batch, until the next would not be ready in time by the one before.

    Each begins when it is its `turn`, for which it waits while there is time; that wait says nothing of the speed.
    """
    at, size, speed = 0, _FIRST_BATCH, 0.0
    while at < len(texts):
        batch = texts[at : at + size]
        chars = sum(map(len, batch))
        with turn(context.remaining()) as free:
            began = context.clock()
            if not free or context.remaining() <= chars * speed:
                return
            found = judged(batch)
            speed = (context.clock() - began) / chars
        yield found
        at, size = at + len(batch), _BATCH
