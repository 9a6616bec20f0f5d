"""Row selectors by name: which reused rows are repaired, each a pure function of fresh and stored KV at one layer."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

from torch import Tensor

from ..backend_engine.types import RowSelector
from ..prompt.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDeviation:
    """The rows whose values (or keys) at `layer` differ most from the stored ones (CacheBlend, arXiv:2405.16444).

    The deviation of a row is the L2 norm of `fresh - stored` over heads and dims, taken in float32. Layer 0 sees no
    context, so its deviations are all zero; 1 is the first layer that tells, and each further layer costs a full pass.
    """

    layer: int = 1
    on: Literal["v", "k"] = "v"

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise BadRequest(f"layer must be at least 1, got {self.layer}", param="reuse.selector.layer")
        if self.on not in ("k", "v"):
            raise BadRequest(f"on must be 'k' or 'v', got {self.on!r}", param="reuse.selector.on")

    def select(self, *, fresh_k: Tensor, fresh_v: Tensor, stored_k: Tensor, stored_v: Tensor, quota: int) -> Tensor:
        """Row indices [quota] int64, ascending. Inputs [rows, kv_heads, head_dim]."""
        fresh, stored = (fresh_v, stored_v) if self.on == "v" else (fresh_k, stored_k)
        # The square orders rows as the norm does.
        deviation = (fresh.float() - stored.float()).square().sum(dim=(1, 2))
        return deviation.topk(quota, sorted=False).indices.sort().values


_SELECTORS: dict[str, Callable[..., RowSelector]] = {"kv_deviation": KVDeviation}
"""A new selector is one frozen dataclass with `layer` and `select`, and one entry here."""


def selector_names() -> tuple[str, ...]:
    """The names that `make_selector` knows, sorted."""
    return tuple(sorted(_SELECTORS))


def make_selector(name: str, **options: Any) -> RowSelector:
    """The selector of this name; raises BadRequest for a name or an option that does not exist, listing what does."""
    factory = _SELECTORS.get(name)
    if factory is None:
        known = ", ".join(selector_names())
        raise BadRequest(f"there is no row selector {name!r}; there are: {known}", param="reuse.selector")
    allowed = signature(factory).parameters
    for option in options:
        if option not in allowed:
            known = ", ".join(allowed)
            raise BadRequest(
                f"the selector {name!r} has no option {option!r}; it has: {known}", param=f"reuse.selector.{option}"
            )
    return factory(**options)
