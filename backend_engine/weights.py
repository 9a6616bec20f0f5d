"""Weights of the decoder, read from the safetensors files of a model directory, with fused matrices."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..prompt.errors import ModelUnavailable
from .linear import Forms, Linear, Table, float_forms
from .spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; `qkv` stacks queries, keys and values, `gate_up` gate and up projections."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: weights of the query heads' norm, then of the key heads'
    out: Linear  # [hidden, heads * head_dim]
    out_norm: Tensor | None  # [hidden]: of what attention adds
    post_norm: Tensor  # [hidden]: of what the feed-forward reads
    gate_up: Linear  # [2 * ffn, hidden]
    down: Linear  # [hidden, ffn]
    down_norm: Tensor | None  # [hidden]: of what the feed-forward adds


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All weights of a model on one device. `dtype` is that of activations; matrices may be quantized.

    Norms are what a normed value is multiplied by: of a family with `norm_offset` 1 + what is stored, in float32.
    """

    dtype: torch.dtype

    embedding: Table  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Linear  # [vocab, hidden]


class WeightSource(Protocol):
    """Where tensors come from, by their names in Hugging Face checkpoints."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def get(self, name: str) -> Tensor: ...


class SafetensorsSource:
    """The safetensors files of a model directory, sharded or not. Tensors are read when asked for."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, tuple[Path, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(directory):
            with _opened(path) as file:
                for stored in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    name = _plain_name(stored)
                    self._files[name] = (path, stored)
                    self._shapes[name] = tuple(file.get_slice(stored).get_shape())

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What there is, without reading it."""
        return self._shapes

    def get(self, name: str) -> Tensor:
        """The tensor called `name`, in its stored dtype on the CPU. Raises ModelUnavailable if it cannot be read."""
        path, stored = self._files[name]
        with _opened(path) as file:
            return file.get_tensor(stored)


def _plain_name(stored: str) -> str:
    """A language model's tensor by the name that it would have alone, where it is part of a larger model."""
    for nested, plain in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if stored.startswith(nested):
            return plain + stored.removeprefix(nested)
    return stored.removeprefix("language_model.")


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a model directory, in fixed order. Raises ModelUnavailable if one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(index, error) from error
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ModelUnavailable(f"{index}: files are missing: {_some(missing)}; pull the model again")
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelUnavailable(f"{directory}: no *.safetensors file; convert weights of other formats first")
    return files


def load_weights(
    source: WeightSource,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    forms: Forms | None = None,
    native: bool = False,
) -> Weights:
    """Read, convert and fuse all weights, and bring them into `forms` (None: the fastest that are not quantized).

    `native`: in memory, and without `forms` in forms, that native steps can read. Raises ModelUnavailable naming the
    tensors that do not fit.
    """
    device = torch.device(device)
    shapes = expected_shapes(spec)
    nbytes = dtype.itemsize * sum(math.prod(shape) for shape in shapes.values())
    forms = forms or float_forms(dtype, device, nbytes=nbytes, native=native)
    _check(source.shapes, shapes)

    def read(*names: str) -> Tensor:
        """The named tensors stacked along their first axis, in memory of our own: a mapped file may change."""
        parts = [source.get(name) for name in names]
        rows = [len(part) for part in parts]
        fused = _empty((sum(rows), *parts[0].shape[1:]), dtype, device, in_rows=native)
        for part, place in zip(parts, fused.split(rows), strict=True):
            place.copy_(part)
        return fused

    def norm(name: str) -> Tensor:
        return (source.get(name).float() + 1.0).to(device) if spec.norm_offset else read(name)

    embedding, head = forms.ends(read("model.embed_tokens.weight"), None if spec.tied else read("lm_head.weight"))
    return Weights(
        dtype=dtype,
        embedding=embedding,
        layers=tuple(_layer(read, norm, forms, spec, f"model.layers.{index}.") for index in range(spec.layers)),
        norm=norm("model.norm.weight"),
        head=head,
    )


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """All tensors that a checkpoint of this model must have."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matrices = {
        "self_attn.q_proj": (queries, spec.hidden, spec.qkv_bias),
        "self_attn.k_proj": (keys, spec.hidden, spec.qkv_bias),
        "self_attn.v_proj": (keys, spec.hidden, spec.qkv_bias),
        "self_attn.o_proj": (spec.hidden, queries, spec.out_bias),
        "mlp.gate_proj": (spec.ffn, spec.hidden, spec.mlp_bias),
        "mlp.up_proj": (spec.ffn, spec.hidden, spec.mlp_bias),
        "mlp.down_proj": (spec.hidden, spec.ffn, spec.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (spec.hidden,),
        "post_attention_layernorm.weight": (spec.hidden,),
    }
    for name, (rows, columns, bias) in matrices.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    if spec.sandwich:
        layer |= {f"{name}_feedforward_layernorm.weight": (spec.hidden,) for name in ("pre", "post")}
    if spec.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
    whole: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    if not spec.tied:
        whole["lm_head.weight"] = (spec.vocab, spec.hidden)
    return whole | {
        f"model.layers.{index}.{name}": shape for index in range(spec.layers) for name, shape in layer.items()
    }


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, in_rows: bool) -> Tensor:
    """Memory for a vector or a matrix [out, in], laid out as its products read it fastest, or `in_rows`.

    On a CPU torch's float32 product of one or two rows with a matrix of more outputs than inputs takes half as long
    when the memory runs along the outputs (7 MB: 0.37 against 0.62 ms on one core); more rows take the packed form.
    """
    if not in_rows and device.type == "cpu" and dtype == torch.float32 and len(shape) == 2 and shape[0] > shape[1]:
        return torch.empty(shape[::-1], dtype=dtype).t()
    return torch.empty(shape, dtype=dtype, device=device)


def _layer(
    read: Callable[..., Tensor], norm: Callable[[str], Tensor], forms: Forms, spec: ModelSpec, prefix: str
) -> LayerWeights:
    def matrix(biased: bool, *names: str) -> Linear:
        weight, bias = ([f"{prefix}{name}.{kind}" for name in names] for kind in ("weight", "bias"))
        return forms.linear(read(*weight), read(*bias) if biased else None)

    def norm_of(name: str) -> Tensor:
        return norm(f"{prefix}{name}_layernorm.weight")

    return LayerWeights(
        input_norm=norm_of("input"),
        qkv=matrix(spec.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=_per_head(norm, spec, prefix) if spec.qk_norm else None,
        out=matrix(spec.out_bias, "self_attn.o_proj"),
        out_norm=norm_of("post_attention") if spec.sandwich else None,
        post_norm=norm_of("pre_feedforward" if spec.sandwich else "post_attention"),
        gate_up=matrix(spec.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=matrix(spec.mlp_bias, "mlp.down_proj"),
        down_norm=norm_of("post_feedforward") if spec.sandwich else None,
    )


def _per_head(norm: Callable[[str], Tensor], spec: ModelSpec, prefix: str) -> Tensor:
    q, k = (norm(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
    return torch.cat([q.expand(spec.heads, -1), k.expand(spec.kv_heads, -1)])


def _check(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    if missing := [name for name in expected if name not in found]:
        raise ModelUnavailable(
            f"the checkpoint lacks {len(missing)} tensors that its config asks for: {_some(missing)}"
        )
    if wrong := [name for name, shape in expected.items() if found[name] != shape]:
        shown = _some([f"{name} is {list(found[name])}, not {list(expected[name])}" for name in wrong])
        raise ModelUnavailable(f"the checkpoint's tensors do not fit its config: {shown}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(f"{path}: damaged or cut short ({error}); pull the model again")


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
