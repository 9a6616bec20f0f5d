"""Moves a chunk's keys to another place (values have none); rope types that cannot move are refused."""

from collections.abc import Iterable

import torch

from ..backend_engine.rope import NONE, LayerRopes, RopeSpec
from ..backend_engine.types import KVBlock
from ..prompt.errors import ConfigError

MOVABLE = frozenset({"default", "linear", "dynamic", "yarn", "llama3", NONE})
"""Rope types whose angle is position times a constant (or nothing), so that a rotation by the difference is exact.

`dynamic` is one of them because the engine runs it only up to the context where its frequencies begin to change.
"""


def require_movable(layers: Iterable[RopeSpec]) -> None:
    """Raise ConfigError naming a layer's rope type whose keys cannot be moved exactly."""
    if fixed := sorted({spec.kind for spec in layers} - MOVABLE):
        known = ", ".join(sorted(MOVABLE))
        raise ConfigError(f"chunk KV cannot be moved under rope type {fixed[0]!r} (only under: {known}); reuse is off")


def repositioned(block: KVBlock, ropes: LayerRopes, *, old: int, new: int) -> KVBlock:
    """The block whose keys, rotated for positions `old ...`, are rotated for `new ...` instead, on the ropes' device.

    A layer's angle is the difference of the engine's own float32 angles at the two places and the arithmetic is
    float32, so float32 keys differ from keys computed at the new place by rounding only, and narrower ones by one more
    rounding to their dtype. `block` is not changed; values, and keys that need no move, are shared with it where the
    device allows.
    """
    require_movable(ropes.specs)
    device = ropes.device
    ahead = device.type == "cuda"  # its kernels come after the copy; the host would read before it has ended
    k, v = block.k.to(device, non_blocking=ahead), block.v.to(device, non_blocking=ahead)
    if old != new:
        places = torch.arange(block.tokens, device=device)
        k = ropes.move(k.float(), places + old, places + new).to(k.dtype)
    return KVBlock(k, v)
