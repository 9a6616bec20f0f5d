"""How chunks are kept: as the model computed them, or rounded to 8 bits with a scale for each token and head.

What is rounded has keys of its own, so that neither kind is ever taken for the other.
"""

from typing import Literal

import torch
from torch import Tensor

from ..backend_engine.rounded_kv import ROUNDED, Block, RoundedBlock, rounded_dtype
from ..backend_engine.types import KVBlock
from ..prompt.errors import ConfigError

ChunkDtype = Literal["auto", "model", "int8", "fp8"]
"""`auto` is `int8` where a GPU reads chunks over its bus, which takes half of the time then, and `model` on a CPU."""


def chosen_dtype(dtype: ChunkDtype, device: str) -> ChunkDtype:
    """What `auto` is for a model on `device`. Raises ConfigError for a dtype that is not known, or cannot run there."""
    if dtype == "auto":
        return "model" if device == "cpu" else "int8"
    if dtype in ROUNDED:
        rounded_dtype(dtype, torch.device(device), field="kv_cache.chunk_dtype")
    elif dtype != "model":
        known = ", ".join(("auto", "model", *ROUNDED))
        raise ConfigError(f"kv_cache.chunk_dtype {dtype!r} is not known; known: {known}")
    return dtype


def chunk_fingerprint(fingerprint: str, dtype: ChunkDtype) -> str:
    """The name of a model's chunks in a dtype that was chosen; `fingerprint` is that of the model's KV."""
    assert dtype != "auto", dtype
    return fingerprint if dtype == "model" else f"{fingerprint}-chunks-{dtype}"


def chunk_fingerprints(fingerprint: str) -> tuple[str, ...]:
    """All names that the chunks of a model's KV may have: what must go, goes however it was kept."""
    return fingerprint, *(f"{fingerprint}-chunks-{name}" for name in ROUNDED)


def kept(block: KVBlock, dtype: ChunkDtype) -> Block:
    """The block as chunks of a dtype that was chosen are kept, on the CPU, in memory of its own.

    A layer at a time: all of a long chunk in float32 is more than a device has left beside its pool.
    """
    if dtype not in ROUNDED:
        return block.mapped(lambda part: part.to("cpu").clone().contiguous())
    layers = [
        RoundedBlock.of(block.mapped(lambda part, at=at: part[at : at + 1]), ROUNDED[dtype]).mapped(Tensor.cpu)
        for at in range(len(block.k))
    ]
    return RoundedBlock(*(torch.cat(parts) for parts in zip(*(layer.tensors for layer in layers), strict=True)))
