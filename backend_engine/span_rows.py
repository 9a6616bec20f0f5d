"""The rows of reused spans, where a device's kernels can read them: in its own memory or pinned in the host's."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .types import KVBlock


@dataclass(frozen=True)
class SpanRows:
    """`blocks` one after the other, all of one dtype, and readable for kernels of `device`."""

    blocks: tuple[KVBlock, ...]
    device: torch.device

    @classmethod
    def readable(cls, blocks: Iterable[KVBlock], *, device: torch.device, dtype: torch.dtype) -> "SpanRows":
        """Blocks of another dtype, and those in memory that the device cannot read, are copied to it."""
        made = (KVBlock(*(_readable(part, device, dtype) for part in (one.k, one.v))) for one in blocks)
        return cls(tuple(made), device)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].k.dtype

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, [rows, kv_heads, head_dim] each, on the device."""
        k, v = (torch.cat([part[index].to(self.device) for part in parts]) for parts in self._parts)
        return k, v

    @cached_property
    def addresses(self) -> Tensor:
        """int64 [4, rows]: where a row's key and its value begin in layer 0, and how many bytes farther in the next."""
        tables = [np.concatenate([_addresses(part) for part in parts], axis=1) for parts in self._parts]
        (keys, key_steps), (values, value_steps) = tables
        return torch.from_numpy(np.stack((keys, values, key_steps, value_steps))).to(self.device, non_blocking=True)

    @property
    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return [one.k for one in self.blocks], [one.v for one in self.blocks]


def _readable(part: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    dense = part.stride()[2:] == (part.shape[3], 1)
    here = part.device.type == device.type or (device.type == "cuda" and part.is_pinned())
    return part if dense and here and part.dtype == dtype else part.to(device, dtype).contiguous()


def _addresses(part: Tensor) -> NDArray[np.int64]:
    """[2, tokens]"""
    step, row = (stride * part.itemsize for stride in part.stride()[:2])
    first = part.data_ptr() + np.arange(part.shape[1], dtype=np.int64) * row
    return np.stack((first, np.full_like(first, step)))
