"""One chunk as bytes: the safetensors format with metadata that lets a reader trust nothing but what it checks.

Tensors `k`, `v` [layers, tokens, kv_heads, head_dim] and `ids` int32 [tokens]. Metadata: format version, key, anchor,
model fingerprint, token count, position of the first token, what computing it again takes, and the XXH3-128 checksum of
all of these and the tensors' bytes.
"""

import json
import math
import struct
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
import xxhash

from ..backend_engine.types import KVBlock
from .keys import FORMAT_VERSION, ChunkKey, ids_from_bytes, ids_to_bytes
from .store import StoredChunk

_LONGEST_HEADER = 1 << 16


class DamagedChunk(Exception):
    """The bytes are not this key's chunk: truncated, flipped, of another model or format. The message says which."""


def encode(key: ChunkKey, chunk: StoredChunk) -> bytes:
    """The whole file of a chunk."""
    ids = torch.frombuffer(bytearray(ids_to_bytes(chunk.ids)), dtype=torch.int32)
    tensors = {"ids": ids, "k": chunk.kv.k.to("cpu").contiguous(), "v": chunk.kv.v.to("cpu").contiguous()}
    metadata = _metadata(key, chunk.position, chunk.flops)
    return safetensors.torch.save(tensors, metadata | {"checksum": _checksum(metadata, tensors)})


def decode(data: bytes, *, key: ChunkKey) -> StoredChunk:
    """The chunk in `data`; raises DamagedChunk unless it is, bit for bit, what was encoded under `key`."""
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    except (safetensors.SafetensorError, ValueError, KeyError) as exc:
        raise DamagedChunk(f"not a complete safetensors file with metadata ({exc})") from exc
    if header is None:  # which safetensors takes for no metadata
        raise DamagedChunk("the metadata is null")
    position = header.get("position", "")
    if not (position.isascii() and position.isdigit() and len(position) < 10):
        raise DamagedChunk(f"position is {position!r}")
    expected = _metadata(key, int(position), _flops(header))
    for name, value in expected.items():
        if header.get(name) != value:
            raise DamagedChunk(f"{name} is {header.get(name)!r}, not {value!r}")
    if set(tensors) != {"ids", "k", "v"} or header.get("checksum") != _checksum(expected, tensors):
        raise DamagedChunk("the checksum does not match the content")
    kv = KVBlock(tensors["k"], tensors["v"])
    return StoredChunk(tuple(tensors["ids"].tolist()), kv, int(position), flops=_flops(header))


def read_ids(handle: BinaryIO) -> tuple[int, ...]:
    """The token ids alone, from the beginning of a file of any key; raises DamagedChunk where there are none.

    Not verified: that a key made of them is the file's name shows that they are right.
    """
    header, end = _header(handle)
    try:
        first, last = header["ids"]["data_offsets"]
        handle.seek(end + first)
        return ids_from_bytes(handle.read(last - first))
    except (ValueError, KeyError, TypeError, OverflowError, struct.error) as exc:
        raise DamagedChunk(f"its token ids cannot be read ({exc})") from exc


def read_flops(handle: BinaryIO) -> float:
    """What computing the chunk again takes, not verified; raises DamagedChunk as above."""
    metadata = _header(handle)[0].get("__metadata__")
    return _flops(metadata if isinstance(metadata, dict) else {})


def _header(handle: BinaryIO) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file, and where it ends."""
    try:
        size = int.from_bytes(handle.read(8), "little")
        if size > _LONGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(handle.read(size))
        if not isinstance(header, dict):
            raise ValueError("the header is no object")
    except ValueError as exc:
        raise DamagedChunk(f"no header of a safetensors file ({exc})") from exc
    return header, 8 + size


def _flops(metadata: dict[str, Any]) -> float:
    """As `_metadata` writes it; 0 for whatever is not written so."""
    try:
        flops = float(metadata.get("flops", 0))
    except (TypeError, ValueError):
        return 0.0
    return flops if 0 <= flops < math.inf else 0.0


def _metadata(key: ChunkKey, position: int, flops: float) -> dict[str, str]:
    return {
        "format": f"promptsluice-chunk-{FORMAT_VERSION}",
        "key": key.digest,
        "anchor": key.anchor,
        "fingerprint": key.fingerprint,
        "tokens": str(key.tokens),
        "position": str(position),
        "flops": repr(float(flops)),
    }


def _checksum(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    # XXH3 runs at memory speed where BLAKE2b takes as long as the read; this guards against damage, not against attack.
    digest = xxhash.xxh3_128()
    digest.update(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
