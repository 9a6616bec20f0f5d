"""Which reused rows are repaired, by name: selectors inside the forward, and choosers before it. Each a pure function.

A selector sees fresh and stored KV of all rows at one layer, which all rows have to reach. A chooser sees where the
rows stand and how much the question looks at them; the rows that it leaves out cost nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..backend_engine.types import RowChooser, RowSelector
from ..prompt.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDeviation:
    """The rows whose values, keys or both at `layer` differ most from the stored ones (CacheBlend, arXiv:2405.16444).

    The deviation of a row is the L2 norm of `fresh - stored` over heads and dims, taken in float32; of both, the square
    root of the sum of squares. Layer 0 sees no context, so its deviations are all zero; 1 is the first layer that
    tells, and each further layer costs a full pass.
    """

    layer: int = 1
    on: Literal["v", "k", "kv"] = "v"

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise BadRequest(f"layer must be at least 1, got {self.layer}", param="reuse.selector.layer")
        if self.on not in ("k", "v", "kv"):
            raise BadRequest(f"on must be 'k', 'v' or 'kv', got {self.on!r}", param="reuse.selector.on")

    def select(self, *, fresh_k: Tensor, fresh_v: Tensor, stored_k: Tensor, stored_v: Tensor, quota: int) -> Tensor:
        """Row indices [quota] int64, ascending. Inputs [rows, kv_heads, head_dim]."""
        pairs = {"k": (fresh_k, stored_k), "v": (fresh_v, stored_v)}
        # The square orders rows as the norm does.
        deviation = torch.zeros(len(fresh_k), device=fresh_k.device)
        for fresh, stored in map(pairs.__getitem__, self.on):
            deviation += (fresh.float() - stored.float()).square().sum(dim=(1, 2))
        return deviation.topk(quota, sorted=False).indices.sort().values


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeads:
    """The first rows of each chunk, the same number of all, which lack most of what stands before them."""

    depth: None = None
    until: float = 1.0

    def choose(self, *, attention: Tensor | None, offsets: Tensor, quota: int) -> Tensor:
        """Row indices [quota] int64."""
        return offsets.argsort(stable=True)[:quota]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryAttention:
    """The rows that the question looks at most, in the layers from the share `depth` on up to `until`, after `heads`
    first rows of each chunk, which count as looked at most of all."""

    depth: float = 2 / 3
    heads: int = 0
    until: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.depth < 1:
            raise BadRequest(f"depth must be from 0 to below 1, got {self.depth}", param="reuse.selector.depth")
        if not self.depth < self.until <= 1:
            raise BadRequest(
                f"until must be above depth ({self.depth}) and at most 1, got {self.until}",
                param="reuse.selector.until",
            )
        if self.heads < 0:
            raise BadRequest(f"heads must not be negative, got {self.heads}", param="reuse.selector.heads")

    def choose(self, *, attention: Tensor | None, offsets: Tensor, quota: int) -> Tensor:
        """Row indices [quota] int64."""
        assert attention is not None, "the engine measures it where there is a depth"
        first = offsets.to(attention.device) < self.heads
        return attention.masked_fill(first, float("inf")).topk(quota, sorted=False).indices


class Repair(NamedTuple):
    """How rows are found: by a selector or by a chooser; the other one is None."""

    selector: RowSelector | None = None
    chooser: RowChooser | None = None


AUTO = Repair(chooser=QueryAttention())
"""What is used where nothing is said: the best of benchmarks/blend_quality.py."""

_SELECTORS: dict[str, Callable[..., RowSelector]] = {"kv_deviation": KVDeviation}
_CHOOSERS: dict[str, Callable[..., RowChooser]] = {"chunk_heads": ChunkHeads, "query_attention": QueryAttention}
"""A new one is a frozen dataclass with `layer` and `select`, or `depth`, `until` and `choose`, and an entry here."""


def selector_names() -> tuple[str, ...]:
    """The names that `make_repair` knows, sorted."""
    return tuple(sorted(("auto", *_SELECTORS, *_CHOOSERS)))


def make_repair(name: str, **options: Any) -> Repair:
    """The way of this name; raises BadRequest for a name or an option that does not exist, listing what does."""
    if name == "auto":
        return _made(name, lambda: AUTO, options)
    if name in _SELECTORS:
        return Repair(selector=_made(name, _SELECTORS[name], options))
    if name in _CHOOSERS:
        return Repair(chooser=_made(name, _CHOOSERS[name], options))
    known = ", ".join(selector_names())
    raise BadRequest(f"there is no row selector {name!r}; there are: {known}", param="reuse.selector")


def _made(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> Any:
    allowed = signature(factory).parameters
    for option in options:
        if option not in allowed:
            known = ", ".join(allowed)
            raise BadRequest(
                f"the selector {name!r} has no option {option!r}; it has: {known}", param=f"reuse.selector.{option}"
            )
    return factory(**options)
