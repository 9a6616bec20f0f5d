"""The sampling parameters of the running requests, by their rows in the running table, where the device reads them."""

import numpy as np
import torch
from torch import Tensor

from .params import SamplingParams
from .sampling import SamplingTensors

_INTS = 3  # int64 top_k, seed and prompt; behind them float32 temperature, top_p and min_p, and one that is not used


class SamplingTable:
    """`rows` rows, each written once when a request comes; at first all are greedy. Nothing is read back.

    A row reaches the device with the next `refresh`. Who decodes greedily is not waited for: each transfer costs a
    GPU's host some 50 us, and a cached prompt's first token needs none of them.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._host = np.zeros((rows, _INTS + 2), dtype=np.int64)
        self._host_floats = self._host[:, _INTS:].view(np.float32)
        self._host_floats[:, 1] = 1.0
        self._rows = torch.from_numpy(self._host.copy()).to(device)
        self._ints, self._floats = self._rows[:, :_INTS], self._rows[:, _INTS:].view(torch.float32)
        self._stale: set[int] = set()

    def enter(self, row: int, params: SamplingParams, *, seed: int, prompt: int) -> None:
        """A request with a prompt of so many tokens has this row from now on."""
        self._host[row, :_INTS] = params.top_k, seed, prompt
        self._host_floats[row, :3] = params.temperature, params.top_p, params.min_p
        self._stale.add(row)

    def refresh(self) -> None:
        """Bring the device's rows up to date; waits for nothing that the device is busy with."""
        for row in self._stale:  # seldom more than one
            # Memory that is not pinned has been read when this returns.
            self._rows[row].copy_(torch.from_numpy(self._host[row]), non_blocking=True)
        self._stale.clear()

    def rows(self, rows: Tensor, *, drawn: Tensor) -> SamplingTensors:
        """The parameters of some rows, whose requests have drawn so many tokens; both int64 [S] on the device."""
        temperature, top_p, min_p, _ = self._floats[rows].T.contiguous()
        top_k, seed, _ = self._ints[rows].T.contiguous()
        return SamplingTensors(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, drawn=drawn)

    def after(self, places: Tensor, rows: Tensor) -> SamplingTensors:
        """The parameters of what is drawn after the tokens at these places of their requests; both int64 [S]."""
        return self.rows(rows, drawn=places + 1 - self._ints[rows, 2])
