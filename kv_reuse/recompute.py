"""What a stored chunk saves: the work of computing it again, and by that which chunk a full store lets go of first."""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from ..backend_engine.spec import ModelSpec

LOOKED_AT = 16
"""Of the least recently used chunks so many are compared before one of them goes."""


def prefill_flops(spec: ModelSpec, tokens: int, *, before: int = 0) -> float:
    """Floating-point operations of prefilling `tokens` tokens behind `before` others whose KV is there.

    Two for each weight of the layers and each row, four for each query head, head dimension, row and key (Kaplan et
    al., arXiv:2001.08361, section 2.1); windows are not counted. From sizes, not from a clock, so that it is the same
    on every machine and in every run.
    """
    width = spec.heads * spec.head_dim
    weights = spec.hidden * (2 * width + 2 * spec.kv_heads * spec.head_dim) + 3 * spec.hidden * spec.ffn
    pairs = tokens * before + tokens * (tokens + 1) / 2
    return spec.layers * (2.0 * weights * tokens + 4.0 * width * pairs)


class Candidate(NamedTuple):
    """`age` since the last use, in any unit; `flops` that computing it again takes; `nbytes` that it holds."""

    age: float
    flops: float
    nbytes: int


C = TypeVar("C")


def first_to_go(candidates: Iterable[tuple[C, Candidate]]) -> C:
    """The one that saves the least work for a byte and for the time that it went unused; of equals the first.

    Hyperbolic caching (Blankstein, Sen and Freedman, USENIX ATC 2017). Among chunks of one model and one size this is
    the least recently used one; of a larger model's, or of longer ones, the store keeps what is dearer for longer.
    """
    return max(candidates, key=lambda one: _uselessness(one[1]))[0]


def _uselessness(candidate: Candidate) -> float:
    # What nothing is known of costs next to nothing: it goes before all others, and by age among its like.
    density = max(candidate.flops, 1e-9) / max(candidate.nbytes, 1) if candidate.flops else 1e-30
    return max(candidate.age, 0.0) / density
