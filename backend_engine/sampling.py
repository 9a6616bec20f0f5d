"""Next tokens for a batch of logits: greedy, temperature, top-k, top-p, min-p. Tensor work, no loop over rows.

What a row draws from is the same function of it everywhere; only who waits for whom differs (`sample`, `sample_ahead`).

A row's randomness is a hash of (its seed, the number of tokens it has generated): one uniform number in [0, 1), fed to
the inverse cumulative distribution. So a request's tokens do not depend on the batch that it happens to run in.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .likeliest import likeliest

# A filtered row is sorted only as far as this; a row whose nucleus is wider is sorted in full. A constant: the choice
# between the two must depend on the row alone.
CANDIDATES = 1024

UNDECIDED = -1
"""In place of an id that a step could not draw without waiting for the host."""

COLDEST = 1e-5
"""Up to here a temperature is greedy: dividing by it would overflow float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """The parameters of S rows, each [S]. `drawn` is how many tokens the row's request has generated."""

    temperature: Tensor  # float32, 0: greedy
    top_k: Tensor  # int64, 0: off
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64
    drawn: Tensor  # int64

    @property
    def random(self) -> Tensor:
        """Which rows are not greedy, bool [S]."""
        return self.temperature > COLDEST

    @property
    def filtered(self) -> Tensor:
        """Which rows cannot draw from the whole distribution, bool [S]."""
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

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
    likeliest. Reads back which rows need what: on a GPU it waits.
    """
    ids = logits.argmax(-1)
    for rows, draw in (
        (params.random & ~params.filtered, _draw_any),
        (params.random & params.filtered, _draw_filtered),
    ):
        chosen = rows.nonzero().squeeze(1)
        if len(chosen):
            part = params.rows(chosen)
            ids[chosen] = draw(logits[chosen].float() / part.temperature[:, None], part)
    return ids


def sample_ahead(logits: Tensor, params: SamplingTensors, *, filtered: bool) -> Tensor:
    """As `sample`, with the same ids, but nothing is read back and no shape depends on a value: for CUDA graphs.

    Without `filtered`, the filters of all rows must be off. A row that CANDIDATES do not suffice for is UNDECIDED.
    `logits` may be narrower than float32.
    """
    # A quotient of a narrow and a float32 tensor is float32: no wide copy of the logits is made for it.
    scaled = logits / params.temperature.masked_fill(~params.random, 1.0)[:, None]
    probs = scaled.softmax(-1)
    ids = _draw(probs, params)
    if filtered:
        from_few, enough = _draw_candidates(scaled, probs, params)
        ids = torch.where(params.filtered, from_few.masked_fill(~enough, UNDECIDED), ids)
    return torch.where(params.random, ids, likeliest(logits))


def uniform(seed: Tensor, drawn: Tensor) -> Tensor:
    """A float64 in [0, 1) per row, from int64 `seed` and `drawn`: SplitMix64's finalizer twice (Steele et al. 2014)."""
    mixed = _mix(_mix(seed) + drawn * _GOLDEN)
    return _shift(mixed, 11).double() * 2.0**-53


def _draw_any(scaled: Tensor, params: SamplingTensors) -> Tensor:
    return _draw(scaled.softmax(-1), params)


def _draw(probs: Tensor, params: SamplingTensors) -> Tensor:
    """From the whole distribution, in the vocabulary's order: no sorting. First a block of it, then an id in that."""
    rows, vocab = probs.shape
    width = _block(vocab)
    blocks = probs.view(rows, vocab // width, width)
    mass = F.pad(blocks.sum(-1, dtype=torch.float64).cumsum(-1), (1, 0))  # before each block, and of all
    target = uniform(params.seed, params.drawn)[:, None] * mass[:, -1:]
    block = _first_above(mass[:, 1:].contiguous(), target).clamp(max=vocab // width - 1)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, width)).squeeze(1).cumsum(-1, dtype=torch.float64)
    place = _first_above(inside, target - mass.gather(-1, block)).clamp(max=width - 1)
    return (block * width + place).squeeze(1)


@cache
def _block(vocab: int) -> int:
    """The divisor of the vocabulary's size that is nearest to its root."""
    return min((width for width in range(1, vocab + 1) if vocab % width == 0), key=lambda width: abs(width**2 - vocab))


def _draw_filtered(scaled: Tensor, params: SamplingTensors) -> Tensor:
    probs = scaled.softmax(-1)
    ids, enough = _draw_candidates(scaled, probs, params)
    many = (~enough).nonzero().squeeze(1)
    if len(many):
        ids[many] = _draw_sorted(scaled[many], probs[many], params.rows(many))
    return ids


def _draw_candidates(scaled: Tensor, probs: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """From the CANDIDATES likeliest, and for which rows these were enough."""
    width = min(CANDIDATES, scaled.shape[-1])
    top, order = scaled.topk(width, dim=-1)
    kept, enough = _keep(top, probs.gather(-1, order), params)
    return _choose(top, order, kept, params), torch.ones_like(enough) if width == scaled.shape[-1] else enough


def _draw_sorted(scaled: Tensor, probs: Tensor, params: SamplingTensors) -> Tensor:
    top, order = scaled.sort(dim=-1, descending=True, stable=True)
    kept, _ = _keep(top, probs.gather(-1, order), params)
    return _choose(top, order, kept, params)


def _keep(top: Tensor, probs: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """How many of the candidates `top` [S, K] (descending) pass the filters, and whether K was enough to know.

    `probs` [S, K] are their shares of the whole vocabulary.
    """
    width = top.shape[-1]
    mass = probs.cumsum(-1, dtype=torch.float64)
    top_k = params.top_k.masked_fill(params.top_k <= 0, torch.iinfo(torch.int64).max)
    within = top_k.clamp(max=width)[:, None]
    total = mass.gather(-1, within - 1).masked_fill(top_k[:, None] > width, 1.0)
    place = torch.arange(width, device=top.device)
    nucleus = (mass - probs < params.top_p.double()[:, None] * total) | (params.top_p >= 1)[:, None]
    likely = top - top[:, :1] >= params.min_p.log()[:, None]
    # The likeliest token always stays: a top_p that float32 rounds to 0 would leave none.
    kept = ((place < within) & nucleus & likely).sum(-1).clamp(min=1)
    return kept, (kept < width) | (top_k <= width)


def _choose(top: Tensor, order: Tensor, kept: Tensor, params: SamplingTensors) -> Tensor:
    """By the inverse cumulative distribution of the first `kept` [S] of the candidates."""
    place = torch.arange(top.shape[-1], device=top.device)
    mass = (top - top[:, :1]).double().exp().masked_fill(place >= kept[:, None], 0.0).cumsum(-1)
    found = _first_above(mass, uniform(params.seed, params.drawn)[:, None] * mass[:, -1:])
    return order.gather(-1, torch.minimum(found, kept[:, None] - 1)).squeeze(1)


def _first_above(mass: Tensor, target: Tensor) -> Tensor:
    """The first place whose cumulative mass [S, K] exceeds the target [S, 1]; K where none does."""
    return torch.searchsorted(mass, target, right=True)


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
