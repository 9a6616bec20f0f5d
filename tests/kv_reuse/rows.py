"""A row selector for tests that takes any rows and tells which."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomRows:
    """`chosen` has what each call returned, in order."""

    seed: int
    layer: int = 1
    chosen: list[Tensor] = field(default_factory=list)

    def select(self, *, fresh_k: Tensor, fresh_v: Tensor, stored_k: Tensor, stored_v: Tensor, quota: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + len(self.chosen))
        rows = torch.randperm(len(fresh_k), generator=generator)[:quota].sort().values
        self.chosen.append(rows)
        return rows
