"""The sampling parameters of the running requests, by their rows in the running table, where the device reads them."""

import torch
from torch import Tensor

from .params import SamplingParams
from .sampling import SamplingTensors


class SamplingTable:
    """`rows` rows, each written once when a request comes; at first all are greedy. Nothing is read back."""

    def __init__(self, rows: int, device: torch.device) -> None:
        # Rows without gaps, so that a request comes with two plain transfers; each costs a GPU's host some 20 us.
        self._floats = torch.tensor((0.0, 1.0, 0.0)).repeat(rows, 1).to(device)  # temperature, top_p, min_p
        self._ints = torch.zeros(rows, 3, dtype=torch.int64, device=device)  # top_k, seed, prompt

    def enter(self, row: int, params: SamplingParams, *, seed: int, prompt: int) -> None:
        """A request with a prompt of so many tokens has this row from now on."""
        floats, ints = (params.temperature, params.top_p, params.min_p), (params.top_k, seed, prompt)
        self._floats[row].copy_(torch.tensor(floats), non_blocking=True)
        self._ints[row].copy_(torch.tensor(ints), non_blocking=True)

    def rows(self, rows: Tensor, *, drawn: Tensor) -> SamplingTensors:
        """The parameters of some rows, whose requests have drawn so many tokens; both int64 [S] on the device."""
        temperature, top_p, min_p = self._floats[rows].T.contiguous()
        top_k, seed, _ = self._ints[rows].T.contiguous()
        return SamplingTensors(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, drawn=drawn)

    def after(self, places: Tensor, rows: Tensor) -> SamplingTensors:
        """The parameters of what is drawn after the tokens at these places of their requests; both int64 [S]."""
        return self.rows(rows, drawn=places + 1 - self._ints[rows, 2])
