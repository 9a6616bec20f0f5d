"""Answers that come compressed, piece by piece: the two codings that upstreams are told we take."""

import zlib

import httpx

CODINGS = "gzip, deflate"
_MOST = 1 << 20  # bytes that are unpacked at a time: a bomb is met by who counts them


class Unpacker:
    """Unpacks a body: after each piece that is fed, `take` until it gives nothing more. Several gzip members are one
    body.

    `raw_too`: servers send what they call deflate with zlib's head, as the standard has it, and without.
    """

    def __init__(self, *, raw_too: bool) -> None:
        self._raw_too = raw_too
        self._object: zlib._Decompress | None = None
        self._rest = b""
        self.more = False

    def feed(self, piece: bytes) -> None:
        self._rest += piece
        self.more = True

    def take(self) -> bytes:
        """What has come of it, at most 1 MiB at a time; b"" when the next piece is needed. `more`: whether there may be
        more without it. httpx.DecodingError for data that are broken.
        """
        while self.more:
            if self._object is None or self._object.eof:
                if not self._rest:
                    self.more = False
                    break
                self._object = zlib.decompressobj(self._form(self._rest[0]))
            try:
                unpacked = self._object.decompress(self._rest, _MOST)
            except zlib.error as error:
                raise httpx.DecodingError("the answer cannot be unpacked") from error
            self._rest = self._object.unused_data if self._object.eof else self._object.unconsumed_tail
            self.more = bool(self._rest) or len(unpacked) == _MOST
            if unpacked:
                return unpacked
        return b""

    def end(self) -> None:
        """The body has ended: httpx.DecodingError if it broke off. An empty one is no compressed one."""
        if self._object is not None and not self._object.eof:
            raise httpx.DecodingError("the answer broke off while it was unpacked")

    def _form(self, first: int) -> int:
        """As zlib has it. No raw deflate begins with zlib's 8 or gzip's 0x1f: the one would be a stored block with
        padding that is not zero, the other a block of no type.
        """
        raw = self._raw_too and first & 15 != 8 and first != 0x1F
        return -zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32


def unpacker(encoding: str) -> Unpacker | None:
    """For a `content-encoding`; None where there is nothing to unpack, httpx.DecodingError for a coding that nobody
    asked for.
    """
    named = encoding.strip().lower()
    if named in ("", "identity"):
        return None
    if named not in ("gzip", "x-gzip", "deflate"):
        raise httpx.DecodingError("the answer has a content-encoding that was not asked for")
    return Unpacker(raw_too=named == "deflate")
