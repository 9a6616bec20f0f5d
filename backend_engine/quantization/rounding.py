"""How matrices and rows are rounded to fewer bits, in plain torch: what every kernel's numbers are defined by.

int8: `quant.quantized_rows`. fp8 is e4m3 (arXiv:2209.05433), four bits of exponent and three of mantissa, with a scale
for each row. int4: each group of GROUP inputs of an output has a smallest value and a step, both bfloat16, chosen for
the least squared error.
"""

from itertools import product

import torch
from torch import Tensor

GROUP = 32  # inputs that share a step and a smallest value: one more bit a weight
FP8 = torch.float8_e4m3fn
FP8_MOST = torch.finfo(FP8).max
_LEVELS = 15
# Parts of a group's range, on either side of its middle, that are tried: cutting off some weights serves the others.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
_TINY = 1e-30  # a row of zeros must not be divided by zero
_ROWS = 4096  # that are rounded at a time: a whole matrix in float32 may be more than the device has left


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [rows, columns] as e4m3 and float32 scales [rows], `x ~ scales[:, None] * e4m3`."""
    x = x.float()
    scales = (x.abs().amax(dim=1) / FP8_MOST).clamp_min_(_TINY)
    return (x / scales[:, None]).to(FP8).contiguous(), scales


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`weight` [out, in], `in` a multiple of GROUP, as (packed, steps, least), with
    `w[o, i] ~ steps[g, o] * q + least[g, o]`, q in 0..15, g = i // GROUP.

    `packed` is uint8 [out, in / 2]: byte j of a group has input j of it in its low half and input j + GROUP / 2 in its
    high half, so that either half is a run of inputs. `steps` and `least` are bfloat16 [in / GROUP, out].
    """
    parts = [_packed(rows.float()) for rows in weight.split(_ROWS)]
    packed, steps, least = (list(column) for column in zip(*parts, strict=True))
    return torch.cat(packed), torch.cat(steps, dim=1), torch.cat(least, dim=1)


def int4_widened(packed: Tensor, steps: Tensor, least: Tensor) -> Tensor:
    """What `int4_groups` stands for, float32 [out, in]."""
    halves = packed.unflatten(1, (-1, GROUP // 2))
    levels = torch.cat((halves & 15, halves >> 4), dim=2)  # [out, groups, GROUP]
    return (levels * steps.t()[..., None].float() + least.t()[..., None].float()).flatten(1)


def _packed(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    middle = (low + high) / 2
    best = _levels(groups, low, high)
    for below, above in product(_SHARES, _SHARES):
        tried = _levels(groups, middle + (low - middle) * below, middle + (high - middle) * above)
        better = tried[3] < best[3]
        best = tuple(torch.where(better, new, old) for new, old in zip(tried, best, strict=True))
    levels, steps, least, _ = best
    first, second = levels.to(torch.uint8).chunk(2, dim=2)
    return (
        (first | second << 4).flatten(1).contiguous(),
        steps.squeeze(2).t().bfloat16().contiguous(),
        least.squeeze(2).t().bfloat16().contiguous(),
    )


def _levels(groups: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    """The nearest of 16 levels from `low` to `high`, as (levels, step, start, squared error of the group), all float32.

    Levels are those of the step and start in bfloat16, so that rounding these costs nothing but some of the range.
    """
    start = low.bfloat16().float()
    step = ((high - start) / _LEVELS).clamp_min_(_TINY).bfloat16().float()
    levels = (groups - start).div_(step).round_().clamp_(0, _LEVELS)
    error = (levels * step + start - groups).square_().sum(dim=2, keepdim=True)
    return levels, step, start, error
