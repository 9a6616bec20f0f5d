"""Content keys of chunks: what must be equal for stored KV to stand in for computed KV. No texts, only token ids."""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

FORMAT_VERSION = 1
"""Version of the key and of the file format; a new one makes every older entry a miss."""


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The name of one chunk's KV: 64 hexadecimal digits, equal exactly when model, salt and token ids are equal.

    `fingerprint` (the model's) and `tokens` are carried along so that a store can check what it finds.
    """

    digest: str
    fingerprint: str
    tokens: int


@dataclass(frozen=True, slots=True)
class KeySpace:
    """Makes the keys of one model and one tenant.

    `salt` is set by the server, never by a client: for whoever has another salt, a chunk is a miss, in its content and
    in its timing.
    """

    fingerprint: str
    salt: str = ""

    def key(self, ids: Sequence[int]) -> ChunkKey:
        """The BLAKE2b (RFC 7693) digest, 256 bits, of version, fingerprint, salt and the ids as little-endian int32."""
        digest = hashlib.blake2b(digest_size=32, person=b"promptsluice-kv")
        digest.update(struct.pack("<I", FORMAT_VERSION))
        for text in (self.fingerprint, self.salt):
            raw = text.encode()
            # Lengths first, or ("ab", "c") and ("a", "bc") would be one key.
            digest.update(struct.pack("<Q", len(raw)) + raw)
        digest.update(ids_to_bytes(ids))
        return ChunkKey(digest.hexdigest(), self.fingerprint, len(ids))


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, the form that is hashed and stored."""
    values = array("i", ids)
    assert values.itemsize == 4, f"a C int has {values.itemsize} bytes here"
    return struct.pack(f"<{len(values)}i", *values)
