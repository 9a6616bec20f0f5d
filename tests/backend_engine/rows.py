"""Row selectors for tests in which any choice does."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FirstRows:
    layer: int = 1

    def select(self, *, fresh_k: Tensor, fresh_v: Tensor, stored_k: Tensor, stored_v: Tensor, quota: int) -> Tensor:
        assert fresh_k.shape == fresh_v.shape == stored_k.shape == stored_v.shape
        return torch.arange(quota)


@dataclass(frozen=True)
class LastRows:
    layer: int = 2

    def select(self, *, fresh_k: Tensor, fresh_v: Tensor, stored_k: Tensor, stored_v: Tensor, quota: int) -> Tensor:
        return torch.arange(len(fresh_k) - quota, len(fresh_k))
