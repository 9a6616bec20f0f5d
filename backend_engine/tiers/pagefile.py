"""One page as bytes: a fixed head that lets a reader trust nothing but what it checks, then the page's KV as it is.

The chunk store's files hold tokens and positions in a format for tools; these hold neither, and are read straight into
place. So each has its own format.
"""

import struct

import xxhash

_HEAD = struct.Struct("<8s16s16sQ16s")  # magic, space, key, bytes that follow, checksum of all of these
_MAGIC = b"PSPAGE01"
HEAD_BYTES = _HEAD.size


class DamagedPage(Exception):
    """The bytes are not this key's page: cut short, flipped, of another model or format. The message says which."""


def head(space: bytes, key: bytes, payload: memoryview) -> bytes:
    """What stands before `payload` in the file."""
    return _HEAD.pack(_MAGIC, space, key, len(payload), _checksum(space, key, payload))


def check(data: memoryview, *, space: bytes, key: bytes, size: int) -> memoryview:
    """The `size` bytes of KV in `data`; raises DamagedPage unless they are, bit for bit, what was written for `key`."""
    if len(data) != HEAD_BYTES + size:
        raise DamagedPage(f"it has {len(data)} bytes, not {HEAD_BYTES + size}")
    magic, its_space, its_key, length, checksum = _HEAD.unpack_from(data)
    for name, found, expected in (
        ("format", magic, _MAGIC),
        ("model", its_space, space),
        ("key", its_key, key),
        ("length", length, size),
    ):
        if found != expected:
            raise DamagedPage(f"its {name} is {found!r}, not {expected!r}")
    payload = data[HEAD_BYTES:]
    if checksum != _checksum(space, key, payload):
        raise DamagedPage("the checksum does not match the content")
    return payload


def _checksum(space: bytes, key: bytes, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(space)
    digest.update(key)
    digest.update(payload)
    return digest.digest()
