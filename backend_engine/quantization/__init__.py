"""Matrices of fewer bits, by name: what may be asked for, where each runs, and the forms it takes there."""

from importlib import import_module
from typing import Literal

import torch

from ...prompt.errors import ConfigError
from ..linear import Forms
from ..quant import Product, check_int8, int8_forms
from ..spec import ModelSpec
from .rounding import GROUP

Quantization = Literal["none", "int8", "int4", "fp8"]

_FP8_CAPABILITY = (8, 9)
# What the inputs of a matrix must be a multiple of: int4's groups; 16 bytes, which fp8 products are aligned to.
_MULTIPLES = {"int8": 16, "int4": GROUP, "fp8": 16}


def quantized_forms(
    quantize: Quantization,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    int8_product: Product | None = None,
) -> Forms | None:
    """The forms of `quantize`; None for none. On a CPU `int8_product` multiplies (None: torch does).

    Raises ConfigError, with a way out, where it cannot run.
    """
    if quantize == "none":
        return None
    if quantize not in _MULTIPLES:
        raise ConfigError(f"quantize {quantize!r} is not known; known: none, {', '.join(_MULTIPLES)}")
    if device.type == "cuda":
        _check_card(quantize, dtype, device)
        check_sizes(quantize, spec)
        return import_module(".forms", __name__).rounded_forms(quantize, dtype)
    if quantize != "int8":
        raise ConfigError(f"quantize {quantize} needs a GPU; on a CPU use int8")
    check_int8(device, dtype)
    return int8_forms(int8_product)


def check_sizes(quantize: Quantization, spec: ModelSpec) -> None:
    """Raise ConfigError for a model whose matrices do not fit the format."""
    multiple = _MULTIPLES[quantize]
    inputs = {
        "hidden size": spec.hidden,
        "feed-forward size": spec.ffn,
        "width of all heads": spec.heads * spec.head_dim,
    }
    for name, size in inputs.items():
        if size % multiple:
            raise ConfigError(
                f"quantize {quantize}: the model's {name} is {size}, no multiple of {multiple}; use another"
            )


def _check_card(quantize: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    allowed = (torch.bfloat16,) if quantize == "fp8" else (torch.bfloat16, torch.float16)
    if dtype not in allowed:
        names = " or ".join(str(one).removeprefix("torch.") for one in allowed)
        raise ConfigError(f"quantize {quantize} on a GPU needs dtype {names}, not {str(dtype).removeprefix('torch.')}")
    found = torch.cuda.get_device_capability(device)
    if quantize == "fp8" and found < _FP8_CAPABILITY:
        raise ConfigError(
            f"quantize fp8 needs a GPU of compute capability 8.9 or later, this one has {found[0]}.{found[1]}; use int8"
        )
