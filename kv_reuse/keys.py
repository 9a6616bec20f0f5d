"""Content keys of chunks: what must be equal for stored KV to stand in for computed KV. No texts, only token ids."""

import hashlib
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

Ids = tuple[int, ...]

FORMAT_VERSION = 3
"""Version of the key and of the file format; a new one makes every older entry a miss."""


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The name of one chunk's KV under one anchor, equal exactly when model, salt, token ids and anchor are equal.

    `digest` names model, salt and ids, `anchor` model, salt and the anchor's ids: 64 hexadecimal digits each, but an
    empty `anchor` for a chunk computed bare. `fingerprint` (the model's) and `tokens` are carried along so that a store
    can check what it finds.
    """

    digest: str
    fingerprint: str
    tokens: int
    anchor: str = ""

    @property
    def name(self) -> str:
        """Both digests as one word that can be a file's name; all names of a chunk begin with its digest."""
        return f"{self.digest}-{self.anchor or 'bare'}"


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Makes the keys of one model and one tenant.

    `salt` is set by the server, never by a client: for whoever has another salt, a chunk is a miss, in its content and
    in its timing.
    """

    fingerprint: str
    salt: str = ""

    def key(self, ids: Sequence[int], *, anchor: Sequence[int] = ()) -> ChunkKey:
        """The key of the chunk `ids`, computed after the tokens `anchor`.

        Digests are BLAKE2b (RFC 7693), 256 bits, of version, fingerprint, salt and the ids as little-endian int32.
        """
        return ChunkKey(self._digest(ids), self.fingerprint, len(ids), self._digest(anchor) if anchor else "")

    def keys(self, chunks: Mapping[Ids, Sequence[Ids]]) -> dict[Ids, list[ChunkKey]]:
        """The keys of each chunk after each of its anchors, in their order."""
        names = {anchor: self._digest(anchor) if anchor else "" for anchor in set(chain(*chunks.values()))}
        keys: dict[Ids, list[ChunkKey]] = {}
        for ids, anchors in chunks.items():
            digest, tokens = self._digest(ids), len(ids)
            keys[ids] = [ChunkKey(digest, self.fingerprint, tokens, names[anchor]) for anchor in anchors]
        return keys

    def _digest(self, ids: Sequence[int]) -> str:
        digest = hashlib.blake2b(digest_size=32, person=b"promptsluice-kv")
        digest.update(struct.pack("<I", FORMAT_VERSION))
        for text in (self.fingerprint, self.salt):
            raw = text.encode()
            # Lengths first, or ("ab", "c") and ("a", "bc") would be one key.
            digest.update(struct.pack("<Q", len(raw)) + raw)
        digest.update(ids_to_bytes(ids))
        return digest.hexdigest()


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, the form that is hashed and stored."""
    values = array("i", ids)
    assert values.itemsize == 4, f"a C int has {values.itemsize} bytes here"
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def ids_from_bytes(raw: bytes) -> tuple[int, ...]:
    """The token ids of `ids_to_bytes`."""
    return struct.unpack(f"<{len(raw) // 4}i", raw)
