"""Answers that come compressed, piece by piece: the two codings that upstreams are told we take."""

import zlib
from collections.abc import Callable

import httpx

CODINGS = "gzip, deflate"


def unpacker(encoding: str) -> Callable[[bytes], bytes] | None:
    """What unpacks the pieces of a body in order, None where there is nothing to unpack.

    httpx.DecodingError for a coding that nobody asked for; so raises what is returned, for data that is broken.
    """
    named = encoding.strip().lower()
    if named in ("", "identity"):
        return None
    if named not in ("gzip", "x-gzip", "deflate"):
        raise httpx.DecodingError("the answer has a content-encoding that was not asked for")
    return _Unpacker(raw_too=named == "deflate")


class _Unpacker:
    """`raw_too`: servers send what they call deflate with zlib's head, as the standard has it, and without."""

    def __init__(self, *, raw_too: bool) -> None:
        self._raw_too = raw_too
        self._object = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, by its head

    def __call__(self, piece: bytes) -> bytes:
        try:
            unpacked = self._object.decompress(piece)
        except zlib.error as error:
            if not self._raw_too:
                raise httpx.DecodingError("the answer cannot be unpacked") from error
            self._raw_too, self._object = False, zlib.decompressobj(-zlib.MAX_WBITS)
            return self(piece)
        self._raw_too = False
        return unpacked
