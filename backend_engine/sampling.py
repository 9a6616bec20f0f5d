"""Next tokens for a batch of logits: greedy, temperature, top-k, top-p, min-p. Tensor work, no loop over rows.

A row's randomness is a hash of (its seed, the number of tokens it has generated): one uniform number in [0, 1), fed to
the inverse cumulative distribution. So a request's tokens do not depend on the batch that it happens to run in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# A filtered row is sorted only as far as this; a row whose nucleus is wider is sorted in full. A constant: the choice
# between the two must depend on the row alone.
CANDIDATES = 1024

# Below this a temperature is greedy: dividing by it would overflow float32.
_COLDEST = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """The parameters of S rows, each [S]. `drawn` is how many tokens the row's request has generated."""

    temperature: Tensor  # float32, 0: greedy
    top_k: Tensor  # int64, 0: off
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64
    drawn: Tensor  # int64

    def rows(self, rows: Tensor) -> "SamplingTensors":
        """The parameters of some rows (int64 indices)."""
        return SamplingTensors(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            drawn=self.drawn[rows],
        )


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Choose one id per row of `logits` [S, vocab]; returns int64 [S].

    The filters apply to the distribution after temperature, in this order: the `top_k` likeliest tokens; of these the
    fewest whose share of the mass reaches `top_p`; of these the ones at least `min_p` times as likely as the
    likeliest.
    """
    ids = logits.argmax(-1)
    random = params.temperature > _COLDEST
    filtered = (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)
    for rows, draw in ((random & ~filtered, _draw), (random & filtered, _draw_filtered)):
        chosen = rows.nonzero().squeeze(1)
        if len(chosen):
            part = params.rows(chosen)
            ids[chosen] = draw(logits[chosen].float() / part.temperature[:, None], part)
    return ids


def uniform(seed: Tensor, drawn: Tensor) -> Tensor:
    """A float64 in [0, 1) per row, from int64 `seed` and `drawn`: SplitMix64's finalizer twice (Steele et al. 2014)."""
    mixed = _mix(_mix(seed) + drawn * _GOLDEN)
    return _shift(mixed, 11).double() * 2.0**-53


def _draw(logits: Tensor, params: SamplingTensors) -> Tensor:
    """From the whole distribution, in the vocabulary's order: no sorting."""
    mass = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    return _invert(mass, uniform(params.seed, params.drawn), logits.shape[-1])


def _draw_filtered(logits: Tensor, params: SamplingTensors) -> Tensor:
    width = min(CANDIDATES, logits.shape[-1])
    top, order = logits.topk(width, dim=-1)
    kept, enough = _keep(top, logits.logsumexp(-1, keepdim=True), params)
    if width < logits.shape[-1] and not bool(enough.all()):
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        few, many = enough.nonzero().squeeze(1), (~enough).nonzero().squeeze(1)
        ids[few] = _choose(top[few], order[few], kept[few], params.rows(few))
        ids[many] = _draw_sorted(logits[many], params.rows(many))
        return ids
    return _choose(top, order, kept, params)


def _draw_sorted(logits: Tensor, params: SamplingTensors) -> Tensor:
    top, order = logits.sort(dim=-1, descending=True, stable=True)
    kept, _ = _keep(top, logits.logsumexp(-1, keepdim=True), params)
    return _choose(top, order, kept, params)


def _keep(top: Tensor, norm: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """How many of the candidates `top` [S, K] (descending) pass the filters, and whether K was enough to know.

    `norm` [S, 1] is the log of the sum over the whole vocabulary.
    """
    width = top.shape[-1]
    probs = (top - norm).double().exp()
    mass = probs.cumsum(-1)
    top_k = torch.where(params.top_k > 0, params.top_k, torch.iinfo(torch.int64).max)
    within = top_k.clamp(max=width)[:, None]
    total = torch.where(top_k[:, None] <= width, mass.gather(-1, within - 1), 1.0)
    place = torch.arange(width, device=top.device)
    nucleus = (mass - probs < params.top_p.double()[:, None] * total) | (params.top_p >= 1)[:, None]
    likely = top - top[:, :1] >= params.min_p.log()[:, None]
    # The likeliest token always stays: a top_p that float32 rounds to 0 would leave none.
    kept = ((place < within) & nucleus & likely).sum(-1).clamp(min=1)
    return kept, (kept < width) | (top_k <= width)


def _choose(top: Tensor, order: Tensor, kept: Tensor, params: SamplingTensors) -> Tensor:
    place = torch.arange(top.shape[-1], device=top.device)
    weights = (top - top[:, :1]).double().exp().masked_fill(place >= kept[:, None], 0.0)
    chosen = _invert(weights.cumsum(-1), uniform(params.seed, params.drawn), kept)
    return order.gather(-1, chosen[:, None]).squeeze(1)


def _invert(mass: Tensor, draw: Tensor, count: Tensor | int) -> Tensor:
    """The first place whose cumulative mass [S, K] exceeds `draw` of the total; less than `count`."""
    target = (draw * mass[:, -1])[:, None]
    found = torch.searchsorted(mass, target, right=True).squeeze(1)
    return torch.minimum(found, torch.as_tensor(count, device=found.device) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)
