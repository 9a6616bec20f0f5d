"""The rows of reused spans, where a device's kernels can read them: in its own memory or pinned in the host's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .rounded_kv import Block, RoundedBlock
from .transfers import carried


@dataclass(frozen=True)
class SpanRows:
    """`blocks` one after the other, all of one kind and dtype, and readable for kernels of `device`.

    `owners` is the block of each row, int32 [rows]. `origins` is of each block its first row's number, then for keys,
    values, and the scales of both, if there are any: the address of the first row in layer 0, and how many bytes
    farther the next row and the next layer are; int64 [blocks, 7 or 13]. Both are on the device.
    """

    blocks: tuple[Block, ...]
    device: torch.device
    owners: Tensor
    origins: Tensor

    @classmethod
    def readable(cls, blocks: Sequence[Block], *, device: torch.device, dtype: torch.dtype) -> "SpanRows":
        """What is in memory that the device cannot read is copied to it; blocks that are not rounded become `dtype`."""

        def reachable(part: Tensor) -> Tensor:
            wanted = part.dtype if rounded else dtype
            here = part.device == device or (device.type == "cuda" and part.is_pinned())
            return part if here and part.dtype == wanted and _dense(part) else part.to(device, wanted).contiguous()

        rounded = isinstance(blocks[0], RoundedBlock)
        there = tuple(block.mapped(reachable) for block in blocks)
        tokens = [block.tokens for block in there]
        firsts = np.cumsum([0, *tokens[:-1]])
        table = [[first, *_origin(block)] for first, block in zip(firsts, there, strict=True)]
        owners = carried(np.repeat(np.arange(len(tokens), dtype=np.int32), tokens), device)
        return cls(there, device, owners, carried(np.array(table, dtype=np.int64), device))

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers."""
        return self.blocks[0].k.dtype

    @property
    def rounded(self) -> bool:
        """Whether the numbers have scales."""
        return isinstance(self.blocks[0], RoundedBlock)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, [rows, kv_heads, head_dim] each, on the device, in float32 if they are rounded."""
        layers = [block.mapped(lambda part: part[index : index + 1].to(self.device)).widened() for block in self.blocks]
        return torch.cat([one.k[0] for one in layers]), torch.cat([one.v[0] for one in layers])


def _dense(part: Tensor) -> bool:
    """Whether all of a row lies together."""
    stride, shape = part.stride()[2:], part.shape[2:]
    return stride[-1] == 1 and (len(shape) == 1 or stride[0] == shape[1])


def _origin(block: Block) -> list[int]:
    numbers = []
    for part in block.tensors:
        layer, row = (stride * part.itemsize for stride in part.stride()[:2])
        numbers += [part.data_ptr(), row, layer]
    return numbers
