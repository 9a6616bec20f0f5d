"""Rotary position embedding (RoFormer, arXiv:2104.09864) with the scaling types of Hugging Face configs.

Angles are float32 products of position and inverse frequency, as transformers computes them. Types whose angles
depend on the length of the whole sequence cannot be mixed with cached keys: `dynamic` is exact up to the model's
original context, which becomes its limit; `longrope` is refused.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..prompt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary embedding. `original_context` is the length that the model was trained for before scaling.

    Fields that a type does not use keep their defaults. `attention_factor` multiplies cosines and sines (yarn).
    """

    kind: str
    dim: int
    theta: float
    original_context: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def rope_from_config(config: Mapping[str, Any], *, head_dim: int, max_positions: int) -> RopeSpec:
    """Read `rope_parameters` (new) or `rope_scaling` with `rope_theta` (old). ConfigError names what is not known."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    params: dict[str, Any] = {**(old or {}), **(new or {})}
    if any(isinstance(value, Mapping) for value in params.values()):
        raise ConfigError("config.json: rope_parameters that differ by layer type are not supported for this family")
    kind = str(params.get("rope_type", params.get("type", "default")))
    if kind not in INVERSE_FREQUENCIES or kind == NONE:
        known = ", ".join(name for name in INVERSE_FREQUENCIES if name != NONE)
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; known: {known}")
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"config.json: partial_rotary_factor {partial} is not supported (only 1.0)")
    needed = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ("factor",))
    if missing := [key for key in needed if params.get(key) is None]:
        raise ConfigError(f"config.json: rope type {kind!r} needs {', '.join(missing)}")
    original = params.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return RopeSpec(
        kind=kind,
        dim=head_dim,
        theta=float(params.get("rope_theta") or config.get("rope_theta") or 10000.0),
        original_context=int(original or max_positions),
        factor=float(params.get("factor") or 1.0),
        low_freq_factor=float(params.get("low_freq_factor") or 1.0),
        high_freq_factor=float(params.get("high_freq_factor") or 4.0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=_yarn_attention_factor(params) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(params: Mapping[str, Any]) -> float:
    """The temperature of YaRN (arXiv:2309.00071, eq. 22); with `mscale` pairs, the ratio that DeepSeek models use."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def temperature(weight: float) -> float:
        factor = float(params["factor"])
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, mscale_all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(float(mscale)) / temperature(float(mscale_all_dim))
    return temperature(1.0)


def _plain(spec: RopeSpec) -> Tensor:
    return 1.0 / (spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim))


def _linear(spec: RopeSpec) -> Tensor:
    return _plain(spec) / spec.factor


def _yarn(spec: RopeSpec) -> Tensor:
    """Interpolated and original frequencies, blended by how often a dimension turns in the original context."""

    def dimension(turns: float) -> float:
        return spec.dim * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)
    keep = 1 - ramp
    return 1.0 / (spec.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _llama3(spec: RopeSpec) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended linearly in turns."""
    plain = _plain(spec)
    wavelength = 2 * math.pi / plain
    turns = spec.original_context / wavelength
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * plain / spec.factor + smooth * plain
    is_long = wavelength > spec.original_context / spec.low_freq_factor
    is_short = wavelength < spec.original_context / spec.high_freq_factor
    return torch.where(is_long, plain / spec.factor, torch.where(is_short, plain, blended))


def _none(spec: RopeSpec) -> Tensor:
    return torch.zeros(spec.dim // 2)


NONE = "none"
"""Of layers whose keys carry no position: a rotation by nothing. No config names it; families choose such layers."""

# `dynamic` raises theta with the sequence's length beyond the original context; up to there it is the plain embedding.
INVERSE_FREQUENCIES: dict[str, Callable[[RopeSpec], Tensor]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "yarn": _yarn,
    "llama3": _llama3,
    NONE: _none,
}


class Rope:
    """Rotates queries and keys in pairs (i, i + dim/2). `inv_freq` is float32 [dim/2]; `scaling` multiplies results."""

    def __init__(self, spec: RopeSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.inv_freq = INVERSE_FREQUENCIES[spec.kind](spec).to(device)
        # Of both halves of a head, as `rotate` wants their sines: few operations, of which a small step has many.
        self._signed = torch.cat((-self.inv_freq, self.inv_freq))
        self.scaling = spec.attention_factor

    def angles(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """What `rotate` needs for `positions` [rows]: two [rows, 1, dim], from float32."""
        angle = positions[:, None] * self._signed
        cos, sin = angle.cos(), angle.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` [rows, heads, dim] to `positions` [rows]."""
        return rotate(x, *self.angles(positions, x.dtype))

    def move(self, k: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Turn keys `k` [..., tokens, heads, dim] from positions `old` to `new` [tokens], as if rotated there first."""
        return rotate(k, *self.turn(old, new, k.dtype))

    def turn(self, old: Tensor, new: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """What `rotate` needs to turn keys from positions `old` to `new` [tokens]: two [tokens, 1, dim].

        The angle is the difference of the float32 angles of the two places.
        """
        before, after = (place.to(self.inv_freq)[:, None] * self.inv_freq for place in (old, new))
        cos, sin = _whole(after.to(torch.float64) - before.to(torch.float64))
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


class LayerRopes:
    """The rotary embeddings of a model's layers, `specs` in their order; layers that share one share its angles."""

    def __init__(self, specs: Sequence[RopeSpec], device: torch.device | str = "cpu") -> None:
        self.specs = tuple(specs)
        self.device = torch.device(device)
        self._ropes = {spec: Rope(spec, device) for spec in self.specs}

    def of(self, layer: int) -> Rope:
        """A layer's embedding."""
        return self._ropes[self.specs[layer]]

    def angles(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, Tensor], ...]:
        """`Rope.angles` of every layer; once a step, and again when rows were dropped."""
        made = {spec: rope.angles(positions, dtype) for spec, rope in self._ropes.items()}
        return tuple(made[spec] for spec in self.specs)

    def turns(self, old: Tensor, new: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """`Rope.turn` of every layer."""
        made = {spec: rope.turn(old, new) for spec, rope in self._ropes.items()}
        return tuple(made[spec] for spec in self.specs)

    def move(self, k: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """`Rope.move` of keys `k` [layers, tokens, heads, dim], each layer by its own angles."""
        if len(self._ropes) == 1:
            return self._ropes[self.specs[0]].move(k, old, new)
        moved = torch.empty_like(k)
        for spec, rope in self._ropes.items():
            layers = [index for index, of_layer in enumerate(self.specs) if of_layer == spec]
            moved[layers] = rope.move(k[layers], old, new)
        return moved


def _whole(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of angles [..., dim/2] for both halves of a head, each [..., dim]."""
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [..., dim]: each half times `cos`, plus the other half times `sin`, as `Rope.angles` gives them."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
