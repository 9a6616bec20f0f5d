"""From a prompt's ids to the stored chunks in it, and to the chunks that the rest of its text is worth storing as.

Without separators and without knowing where documents begin: what is equal is found, however it is laid out around it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from .catalogue import Catalogue
from .cuts import Breaks, cut
from .index import ChunkIndex, Match
from .keys import Ids, KeySpace, ids_to_bytes
from .sights import Sights
from .store import ChunkStore
from .windows import seed_of

_REMEMBERED = 1 << 14  # chunks that were seen, but not stored
_INNER = 0.75  # of a token's worth, where it lies behind the chunk's beginning: it has seen what is not in the prompt

Span = tuple[int, int]
"""(first token, number of tokens)"""


class Fresh(NamedTuple):
    """Chunks of a prompt's new text that are worth storing, and by what all of it is known when it comes again."""

    chunks: tuple[Ids, ...] = ()
    sights: tuple[bytes, ...] = ()


class Finder:
    """Finds in prompts what is stored for one model, and cuts what is not into chunks. For any thread.

    `breaks` says behind which tokens text may be cut (cuts.py); without it, nothing is ever new. A new chunk has
    `shortest` to `longest` tokens, or what a call wants.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        fingerprint: str,
        breaks: Breaks | None = None,
        shortest: int = 32,
        longest: int = 512,
        index: ChunkIndex | None = None,
    ) -> None:
        self._index = ChunkIndex() if index is None else index
        self._catalogue = Catalogue(store, self._index)
        self._fingerprint = fingerprint
        self._breaks = breaks
        self._shortest = shortest
        self._longest = longest
        self._sights = Sights(most=_REMEMBERED)

    def find(
        self,
        ids: Sequence[int],
        *,
        salt: str,
        least: int = 0,
        taken: Sequence[Span] = (),
        until: int | None = None,
    ) -> list[Match]:
        """Stored chunks, and parts of them, of at least `least` tokens in `ids[:until]` outside of the spans `taken`.

        Ascending and disjoint. Where several overlap, the longest one stands, a chunk's beginning before its middle,
        and of the others what is left. Reads no KV; `stale` tells whether the store may hold more than is found.
        """
        least = max(least, self._shortest)
        prompt = np.array(ids[:until], dtype=np.int32)
        return disjoint(self._index.matches(prompt, salt=salt, least=least), taken=taken, least=least)

    def fresh(
        self,
        ids: Sequence[int],
        *,
        salt: str,
        covered: Sequence[Span],
        least: int = 0,
        until: int | None = None,
        sights: int = 1,
        most: int = 1 << 13,
    ) -> Fresh:
        """The chunks as which the text of `ids[:until]` outside of `covered` is worth storing: those of at least
        `least` tokens that are seen the time `sights` or a later one, together at most `most` tokens of them, the first
        ones first. This time counts for later ones when `saw` is told.
        """
        if self._breaks is None or sights < 1:
            return Fresh()
        least, prompt = max(least, self._shortest), np.array(ids[:until], dtype=np.int32)
        chunks: list[Ids] = []
        for start, length in outside(len(prompt), covered):
            run = prompt[start : start + length]
            spans = cut(run, self._breaks, least=least, most=max(self._longest, 2 * least))
            chunks += [tuple(run[at : at + size].tolist()) for at, size in spans]
        names = {chunk: _name(salt, chunk) for chunk in chunks}
        kept: list[Ids] = []
        for chunk, name in names.items():
            if self._sights.times(name) + 1 >= sights and len(chunk) <= most:
                kept.append(chunk)
                most -= len(chunk)
        return Fresh(tuple(kept), tuple(names.values()))

    def saw(self, sights: Iterable[bytes]) -> None:
        """Text that is known by these (`Fresh.sights`) came in a request that ran."""
        for sight in sights:
            self._sights.add(sight)

    def know(self, chunk: Sequence[int], *, salt: str) -> None:
        """Find a chunk from now on: its KV is stored."""
        self._index.add(chunk, salt=salt)

    def forget(self, chunk: Sequence[int], *, salt: str) -> None:
        """Find a chunk no more: its KV is gone."""
        self._index.discard(chunk, salt=salt)

    def stale(self, salt: str) -> bool:
        """Whether `sync` should be called."""
        return self._catalogue.stale(salt)

    def sync(self, salt: str) -> None:
        """Know what other processes, or this one in an earlier life, stored under this salt.

        Blocks on the store for as long as it takes to read the token ids that are new there.
        """
        self._catalogue.sync(KeySpace(self._fingerprint, salt))


def disjoint(matches: Sequence[Match], *, taken: Sequence[Span] = (), least: int) -> list[Match]:
    """The best matches first, then of each other one the longest piece that is left, if it has `least` tokens."""
    occupied = [(start, start + length) for start, length in taken]
    kept: list[Match] = []
    for match in sorted(matches, key=lambda one: (-_worth(one), one.start)):
        piece = _longest_piece(match, occupied)
        if piece.length >= least:
            kept.append(piece)
            occupied.append((piece.start, piece.stop))
    return sorted(kept)


def outside(total: int, spans: Sequence[Span]) -> list[Span]:
    """What of 0 .. total - 1 none of `spans`, in any order, covers; ascending."""
    left, at = [], 0
    for start, length in sorted(spans):
        if min(start, total) > at:
            left.append((at, min(start, total) - at))
        at = max(at, start + length)
    return [*left, (at, total - at)] if at < total else left


def _name(salt: str, chunk: Ids) -> bytes:
    seed = seed_of(salt).to_bytes(8, "little")
    return hashlib.blake2b(ids_to_bytes(chunk), key=seed, digest_size=16).digest()


def _worth(match: Match) -> float:
    return match.length * (_INNER if match.offset else 1.0)


def _longest_piece(match: Match, occupied: Sequence[tuple[int, int]]) -> Match:
    """Of what `occupied`, pairs of the first place and that behind the last one, leaves of a match."""
    meeting = [(start, stop - start) for start, stop in occupied if start < match.stop and match.start < stop]
    if not meeting:
        return match
    inside = [(max(0, start - match.start), length - max(0, match.start - start)) for start, length in meeting]
    at, length = max(outside(match.length, inside), key=lambda span: span[1], default=(0, 0))
    return Match(match.start + at, length, match.chunk, match.offset + at)
