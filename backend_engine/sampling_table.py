"""The sampling parameters of the running requests, by their rows in the running table, where the device reads them."""

import torch
from torch import Tensor

from .params import SamplingParams
from .sampling import SamplingTensors


class SamplingTable:
    """`rows` rows, each written once when a request comes; at first all are greedy. Nothing is read back."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._temperature = torch.zeros(rows, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._top_p = torch.ones(rows, device=device)
        self._min_p = torch.zeros(rows, device=device)
        self._seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._prompt = torch.zeros(rows, dtype=torch.int64, device=device)

    def enter(self, row: int, params: SamplingParams, *, seed: int, prompt: int) -> None:
        """A request with a prompt of so many tokens has this row from now on."""
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = seed
        self._prompt[row] = prompt

    def rows(self, rows: Tensor, *, drawn: Tensor) -> SamplingTensors:
        """The parameters of some rows, whose requests have drawn so many tokens; both int64 [S] on the device."""
        return SamplingTensors(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            drawn=drawn,
        )

    def after(self, places: Tensor, rows: Tensor) -> SamplingTensors:
        """The parameters of what is drawn after the tokens at these places of their requests; both int64 [S]."""
        return self.rows(rows, drawn=places + 1 - self._prompt[rows])
