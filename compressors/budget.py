"""Meeting a token budget: how many of a list of candidates, best first, fit."""

from collections.abc import Callable, Iterable

# Nearer to the budget than this share needs no further measuring.
_CLOSE = 0.01


def most_that_fit(
    candidates: int, *, size_of: Callable[[int], int], target: float, guess: int, expired: Callable[[], bool]
) -> int:
    """The largest k from 0 to `candidates` with `size_of(k) <= target`, or one within 1 % of the target below it.

    `size_of` grows with k and is dear, so the search interpolates from `guess` on; a handful of calls is usual. 0 when
    no other k fits. When time is up, the best that is known to fit, else the best guess.
    """
    low, high = 0, candidates + 1
    low_size, high_size = 0.0, 0.0
    at = min(max(guess, 1), candidates)
    while high - low > 1:
        if expired():
            return low or at
        size = float(size_of(at))
        if size > target:
            high, high_size = at, size
        else:
            low, low_size = at, size
            if size >= (1.0 - _CLOSE) * target:
                break
        at = _between(low, high, low_size, high_size, target)
    return low


def filled(
    chosen: list[int],
    more: Iterable[int],
    *,
    size_of: Callable[[list[int]], int],
    target: float,
    expired: Callable[[], bool],
) -> list[int]:
    """`chosen` and those of `more`, in order, with which it still fits the target; ends when that is nearly met."""
    size = size_of(chosen)
    for one in more:
        if size >= (1.0 - _CLOSE) * target or size + 1 > target or expired():
            break
        wider = [*chosen, one]
        fresh = size_of(wider)
        if fresh <= target:
            chosen, size = wider, fresh
    return chosen


def _between(low: int, high: int, low_size: float, high_size: float, target: float) -> int:
    if high_size <= low_size:
        return (low + high) // 2
    share = (target - low_size) / (high_size - low_size)
    # Aim a little off the interpolated point and never at the borders, so that the interval shrinks from both sides.
    inner = low + round(share * (high - low))
    edge = max(1, (high - low) // 16)
    return min(max(inner, low + edge), high - edge)
