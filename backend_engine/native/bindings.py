"""The structures of step.h and the library's functions, for ctypes, which lets go of the interpreter during a call."""

import ctypes
import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar

MOST_ROWS = 64
MOST_HEAD_DIM = 256
FLOAT32, BFLOAT16, INT8 = range(3)
DONE, WRONG_ID, WRONG_PLACE, NO_MEMORY = range(4)


class Matrix(Structure):
    """Pointers to a weight [outputs, inputs], its scales [outputs] and its bias [outputs], or null."""

    _fields_: ClassVar = [(name, c_void_p) for name in ("weight", "scales", "bias")]


class LayerSpec(Structure):
    _fields_: ClassVar = [
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "qk_norm", "out_norm", "down_norm")),
        ("inverse_frequencies", c_void_p),
        ("rope_scaling", c_float),
        ("window", c_int32),
    ]


class ModelSpec(Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")),
        *((name, c_int32) for name in ("kind", "gelu")),
        *((name, c_float) for name in ("eps", "scale", "embedding_scale")),
        *((name, Matrix) for name in ("embedding", "head")),
        ("norm", c_void_p),
        ("layer", POINTER(LayerSpec)),
    ]


class StepSpec(Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("rows", "requests", "logit_rows", "pages_width", "page_size", "threads")),
        ("slots", c_int64),
        *((name, c_void_p) for name in ("ids", "positions", "row_slots", "logit_row")),
        *((name, c_void_p) for name in ("visible", "query_start", "page_table")),
        *((name, c_void_p) for name in ("pool", "hidden")),
    ]


class AttendSpec(Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("requests", "heads", "kv_heads", "head_dim", "pages_width", "page_size")),
        *((name, c_int32) for name in ("window", "threads")),
        ("slots", c_int64),
        *((name, c_void_p) for name in ("visible", "query_start", "page_table")),
        *((name, c_void_p) for name in ("q", "k", "v", "out")),
        ("scale", c_float),
    ]


class TurnSpec(Structure):
    _fields_: ClassVar = [
        *((name, c_int32) for name in ("rows", "heads", "kv_heads", "head_dim")),
        ("pool_slots", c_int64),
        *((name, c_void_p) for name in ("qkv", "cosines", "sines", "norm", "slots")),
        *((name, c_void_p) for name in ("q", "k", "v")),
        ("eps", c_float),
    ]


def functions(path: Path) -> ctypes.CDLL:
    """The library at `path` with its functions' types. Raises OSError if it cannot be loaded."""
    library = ctypes.CDLL(str(path))
    for name, result, arguments in (
        ("promptsluice_lanes", c_int, []),
        ("promptsluice_open", c_void_p, [POINTER(ModelSpec)]),
        ("promptsluice_close", None, [c_void_p]),
        ("promptsluice_step", c_int, [c_void_p, POINTER(StepSpec)]),
        ("promptsluice_open_products", c_void_p, []),
        ("promptsluice_close_products", None, [c_void_p]),
        (
            "promptsluice_product",
            c_int,
            [c_void_p, POINTER(Matrix), c_void_p, c_int, c_int64, c_int64, c_void_p, c_int],
        ),
        ("promptsluice_share_threads", None, [c_void_p]),
        ("promptsluice_open_prefill", c_void_p, []),
        ("promptsluice_close_prefill", None, [c_void_p]),
        ("promptsluice_attend", c_int, [c_void_p, POINTER(AttendSpec)]),
        ("promptsluice_turn", c_int, [c_void_p, POINTER(TurnSpec), c_int]),
        ("promptsluice_gated", None, [c_void_p, c_void_p, c_int, c_int64, c_int, c_void_p, c_int]),
        ("promptsluice_add_norm", None, [*[c_void_p] * 5, c_float, c_int, c_int64, c_void_p, c_int]),
        ("promptsluice_logits", c_int, [c_void_p, c_void_p, c_int, c_void_p, c_int]),
    ):
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{path} has no {name}") from error
        function.restype, function.argtypes = result, arguments
    return library


def close_with(owner: object, close: Callable[[int], None], handle: int) -> None:
    """Call `close` once nobody holds `owner` any more, but not at exit: a daemon thread may be within a call then."""
    weakref.finalize(owner, close, handle).atexit = False
