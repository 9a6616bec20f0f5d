"""The bytes that a single token stands for, which need not be whole characters."""

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenBytes:
    """Bytes by id. Knows byte-level tokenizers and SentencePiece ones with a byte fallback; of any other, the decoded
    text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._added = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
        kinds = _decoders(json.loads(backend.to_str())["decoder"])
        self._level = _byte_level() if "ByteLevel" in kinds else None
        self._spaces = bool(kinds & {"Replace", "Metaspace", "ByteFallback"})

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:  # the model's vocabulary may be larger than the tokenizer's
            return b""
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "replace")
        if self._level is not None:
            return bytes(self._level[char] for char in piece if char in self._level)
        if self._spaces:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode("utf-8", "replace")
        return self._backend.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")


def _decoders(decoder: Any) -> set[str]:
    """The types of a decoder and of what it is made of."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoders(part) for part in decoder.get("decoders", ())))


def _byte_level() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others are counted on from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
