"""Keys and values in 8 bits: int8 or e4m3, with a float32 scale for each token and head, in one row of bytes a token.

A row holds all heads' numbers, then all heads' scales, each part filled up to 16 bytes, so that whoever moves pages
moves bytes and need not know what they mean. The rounding is `x ~ scale * q`, the head's largest magnitude becoming the
largest number there is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..prompt.errors import ConfigError
from .types import KVBlock, KVDtype

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of a rounded pool, and the largest number of each."""

ROUNDED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What is told apart by name."""

_FP8_CAPABILITY = (8, 9)
_ALIGNED = 16  # bytes that a GPU reads at a time
_TINY = 1e-30  # a head of zeros must not be divided by zero


def pool_dtype(kv_dtype: KVDtype, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the pool of a model with activations of `dtype` holds. Raises ConfigError where that cannot run."""
    if kv_dtype == "auto":
        return dtype
    if kv_dtype not in ROUNDED:
        raise ConfigError(f"kv_dtype {kv_dtype!r} is not known; known: auto, {', '.join(ROUNDED)}")
    return rounded_dtype(kv_dtype, device, field="kv_dtype")


def rounded_dtype(name: str, device: torch.device, *, field: str) -> torch.dtype:
    """The dtype of a name in ROUNDED. Raises ConfigError, which names the setting `field`, where that cannot run."""
    if name == "fp8" and device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found < _FP8_CAPABILITY:
            raise ConfigError(
                f"{field} fp8 needs a GPU of compute capability 8.9 or later, this one has {found[0]}.{found[1]}; "
                "use int8"
            )
    return ROUNDED[name]


def kv_fingerprint(fingerprint: str, kv_dtype: KVDtype) -> str:
    """The name of a model's KV, `fingerprint` being the model's: what was computed over rounded keys is another's."""
    return fingerprint if kv_dtype == "auto" else f"{fingerprint}-{kv_dtype}"


def row_bytes(kv_heads: int, head_dim: int) -> int:
    """Bytes of one token's keys (or values) in one layer."""
    return _aligned(kv_heads * head_dim) + _aligned(4 * kv_heads)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` [..., kv_heads, head_dim] as rows of bytes, uint8 [..., row_bytes]."""
    *lead, heads, dim = x.shape
    numbers, scales = steps_of(x, dtype)
    rows = torch.zeros((*lead, row_bytes(heads, dim)), dtype=torch.uint8, device=x.device)
    rows[..., : heads * dim] = numbers.view(torch.uint8).flatten(-2)
    start = _aligned(heads * dim)
    rows[..., start : start + 4 * heads] = scales.view(torch.uint8)
    return rows


def steps_of(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` [..., heads, dim] as numbers of `dtype` in its shape and the float32 scales [..., heads] that they count."""
    x = x.float()
    scales = (x.abs().amax(dim=-1) / MOST[dtype]).clamp_min_(_TINY)
    steps = x / scales[..., None]
    return (steps.round_() if dtype == torch.int8 else steps).to(dtype), scales


def parts(rows: Tensor, dtype: torch.dtype, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Views of `rows` [..., row_bytes]: numbers [..., heads, dim] of `dtype` and float32 scales [..., heads]."""
    start = _aligned(heads * dim)
    numbers = rows[..., : heads * dim].view(dtype).unflatten(-1, (heads, dim))
    return numbers, rows[..., start : start + 4 * heads].view(torch.float32)


def widened(numbers: Tensor, scales: Tensor) -> Tensor:
    """What they stand for, float32 [..., heads, dim]."""
    # A product of int8 and float32 is one pass; e4m3 has no arithmetic.
    return (numbers if numbers.dtype == torch.int8 else numbers.float()) * scales[..., None]


@dataclass(frozen=True, slots=True)
class RoundedKV:
    """One layer's keys or values in a rounded pool, with what a tensor [slots, kv_heads, head_dim] is asked for.

    `numbers` is int8 or e4m3 [slots, kv_heads, head_dim], `scales` float32 [slots, kv_heads]: views of `rows`, uint8
    [slots, row_bytes].
    """

    rows: Tensor
    numbers: Tensor
    scales: Tensor

    @classmethod
    def of(cls, rows: Tensor, dtype: torch.dtype, heads: int, dim: int) -> "RoundedKV":
        return cls(rows, *parts(rows, dtype, heads, dim))

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read, and of what is best written."""
        return self.scales.dtype

    def __getitem__(self, slots: Tensor | slice) -> Tensor:
        """A copy in float32 of some slots, [chosen, kv_heads, head_dim]."""
        _, heads, dim = self.shape
        return widened(*parts(self.rows[slots], self.numbers.dtype, heads, dim))

    def index_copy_(self, dim: int, slots: Tensor, x: Tensor) -> None:
        """Round `x` [chosen, kv_heads, head_dim] into `slots` [chosen] int64; `dim` is 0, as a tensor's would be."""
        assert dim == 0, dim
        self.rows.index_copy_(0, slots, rounded(x, self.numbers.dtype))


@dataclass(frozen=True, slots=True)
class RoundedBlock:
    """A KVBlock in 8 bits: `k`, `v` int8 or e4m3 [layers, tokens, kv_heads, head_dim] count steps of the float32
    `k_scales`, `v_scales` [layers, tokens, kv_heads].
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor

    @classmethod
    def of(cls, block: KVBlock, dtype: torch.dtype) -> "RoundedBlock":
        """`block` rounded to `dtype`, where it lies."""
        (k, k_scales), (v, v_scales) = steps_of(block.k, dtype), steps_of(block.v, dtype)
        return cls(k, v, k_scales, v_scales)

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.k, self.v, self.k_scales, self.v_scales

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "RoundedBlock":
        """The block of what `change` makes of each tensor."""
        return RoundedBlock(*map(change, self.tensors))

    def part(self, start: int, stop: int | None = None) -> "RoundedBlock":
        """Views of some of the tokens."""
        return self.mapped(lambda tensor: tensor[:, start:stop])

    def widened(self) -> KVBlock:
        """What it stands for, in float32."""
        return KVBlock(widened(self.k, self.k_scales), widened(self.v, self.v_scales))


Block = KVBlock | RoundedBlock


def flaw_of(block: Block) -> str | None:
    """What is wrong with the tensors of a block as such, whatever the model; None if nothing is."""
    k, v, *scales = block.tensors
    if k.dim() != 4:
        return f"k has {k.dim()} dimensions, not 4 (layers, tokens, heads, head size)"
    if v.shape != k.shape or v.dtype != k.dtype:
        return f"v is {v.dtype} {tuple(v.shape)}, but k is {k.dtype} {tuple(k.shape)}"
    if not (k.dtype in MOST if scales else k.is_floating_point() and k.dtype not in MOST):
        return f"k and v are {k.dtype} {'with' if scales else 'without'} scales"
    wrong = next((one for one in scales if one.shape != k.shape[:-1] or one.dtype != torch.float32), None)
    if wrong is not None:
        needed = tuple(k.shape[:-1])
        return f"k_scales and v_scales must be torch.float32 {needed}, found {wrong.dtype} {tuple(wrong.shape)}"
    return None


Stored = Tensor | RoundedKV
"""One layer's keys or values in a pool."""


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
