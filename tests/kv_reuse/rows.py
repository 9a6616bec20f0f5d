"""A row selector and a chooser for tests that take any rows and tell which."""

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


@dataclass(frozen=True)
class RandomPlaces:
    """The same before the prefill. `saw` has the attention that each call was given."""

    seed: int
    depth: float | None = None
    until: float = 1.0
    chosen: list[Tensor] = field(default_factory=list)
    saw: list[Tensor | None] = field(default_factory=list)

    def choose(self, *, attention: Tensor | None, offsets: Tensor, quota: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + len(self.chosen))
        rows = torch.randperm(len(offsets), generator=generator)[:quota]
        self.chosen.append(rows)
        self.saw.append(attention)
        return rows
