"""One chunk as bytes: the safetensors format with metadata that lets a reader trust nothing but what it checks.

Tensors `k`, `v` [layers, tokens, kv_heads, head_dim] and `ids` int32 [tokens]; of a rounded chunk also `k_scales` and
`v_scales` [layers, tokens, kv_heads]. Metadata: format version, key, anchor, model fingerprint, token count, position
of the first token, what computing it again takes, and the XXH3-128 checksum of all of these and the tensors' bytes.
"""

import json
import math
import struct
from typing import Any, BinaryIO

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from ..backend_engine.rounded_kv import Block, RoundedBlock, flaw_of
from ..backend_engine.types import KVBlock
from .keys import FORMAT_VERSION, ChunkKey, ids_from_bytes, ids_to_bytes
from .store import StoredChunk

_LONGEST_HEADER = 1 << 16
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I8": torch.int8,
}
_PLAIN, _ROUNDED = ("k", "v"), ("k", "v", "k_scales", "v_scales")  # the names of a block's tensors, in their order


class DamagedChunk(Exception):
    """The bytes are not this key's chunk: truncated, flipped, of another model or format. The message says which."""


def encode(key: ChunkKey, chunk: StoredChunk) -> bytes:
    """The whole file of a chunk."""
    ids = torch.frombuffer(bytearray(ids_to_bytes(chunk.ids)), dtype=torch.int32)
    parts = zip(_names(chunk.kv), chunk.kv.tensors, strict=True)
    tensors = {"ids": ids, **{name: part.to("cpu").contiguous() for name, part in parts}}
    metadata = _metadata(key, chunk.position, chunk.flops)
    return safetensors.torch.save(tensors, metadata | {"checksum": _checksum(metadata, tensors)})


def decode(data: bytes | Tensor, *, key: ChunkKey) -> StoredChunk:
    """The chunk in `data`; raises DamagedChunk unless it is, bit for bit, what was encoded under `key`, and whole.

    The chunk's tensors are views of `data` if that is a tensor, uint8 [bytes]; else of a copy.
    """
    raw = data if isinstance(data, Tensor) else torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)
    try:
        tensors, header = _opened(raw)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise DamagedChunk(f"not a complete safetensors file with metadata ({exc})") from exc
    position = header.get("position", "")
    if not (isinstance(position, str) and position.isascii() and position.isdigit() and len(position) < 10):
        raise DamagedChunk(f"position is {position!r}")
    expected = _metadata(key, int(position), _flops(header))
    for name, value in expected.items():
        if header.get(name) != value:
            raise DamagedChunk(f"{name} is {header.get(name)!r}, not {value!r}")
    if not {"ids", *_PLAIN} <= set(tensors) or header.get("checksum") != _checksum(expected, tensors):
        raise DamagedChunk("the checksum does not match the content")
    ids, kv = tensors.pop("ids"), _block(tensors)
    if flaw := flaw_of(kv):
        raise DamagedChunk(flaw)
    if ids.shape != (key.tokens,) or kv.tokens != key.tokens:
        raise DamagedChunk(f"it has KV of {kv.tokens} tokens and {ids.numel()} ids, not {key.tokens}")
    return StoredChunk(tuple(ids.tolist()), kv, int(position), flops=_flops(header))


def _names(block: Block) -> tuple[str, ...]:
    return _ROUNDED if isinstance(block, RoundedBlock) else _PLAIN


def _block(tensors: dict[str, Tensor]) -> Block:
    if set(tensors) == set(_PLAIN):
        return KVBlock(*(tensors[name] for name in _PLAIN))
    if set(tensors) == set(_ROUNDED):
        return RoundedBlock(*(tensors[name] for name in _ROUNDED))
    raise DamagedChunk(f"it has the tensors {', '.join(sorted(tensors))}")


def _opened(raw: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, as views, and its metadata; for what is none, whatever reading it raises.

    The format's own library copies each tensor, which takes as long as reading it does.
    """
    whole = raw.numpy().data
    end = 8 + int.from_bytes(whole[:8], "little")
    if end > min(len(whole), _LONGEST_HEADER):
        raise ValueError(f"a header of {end - 8} bytes in a file of {len(whole)}")
    header = json.loads(bytes(whole[8:end]))
    metadata, tensors, covered = header.pop("__metadata__"), {}, 0
    if metadata is None:  # which safetensors takes for no metadata
        raise DamagedChunk("the metadata is null")
    if not isinstance(metadata, dict):
        raise ValueError("the metadata is no object")
    for name, entry in header.items():
        dtype, shape, (first, last) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        size = math.prod(shape) * dtype.itemsize
        misplaced = first < 0 or last > len(whole) - end or (end + first) % dtype.itemsize
        if misplaced or min(shape, default=0) < 0 or last - first != size:
            raise ValueError(f"{name} of {shape} does not lie at {first} to {last}")
        tensors[name] = raw[end + first : end + last].view(dtype).view(shape)
        covered += size
    if covered != len(whole) - end:
        raise ValueError(f"{len(whole) - end} bytes for tensors of {covered}")
    return tensors, metadata


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


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    # XXH3 runs at memory speed where BLAKE2b takes as long as the read; this guards against damage, not against attack.
    digest = xxhash.xxh3_128()
    digest.update(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
