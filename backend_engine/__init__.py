"""The embedded engine: token ids in, token ids out. Names load on first use, as most of them need torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chat import ChunkMark
    from .engine import Engine
    from .grammar import Grammar
    from .loader import LoadedModel, load_model
    from .pool import KVPool
    from .rope import Rope
    from .service import EngineService
    from .spec import ModelSpec
    from .tokenizer import ChatTokenizer, Encoded
    from .types import (
        Delta,
        GenerationRequest,
        KVBlock,
        Result,
        Reuse,
        ReusedSpan,
        RowSelector,
        SamplingParams,
    )

_LAZY = {
    "ChatTokenizer": ".tokenizer",
    "ChunkMark": ".chat",
    "Delta": ".types",
    "Encoded": ".tokenizer",
    "Engine": ".engine",
    "EngineService": ".service",
    "GenerationRequest": ".types",
    "Grammar": ".grammar",
    "KVBlock": ".types",
    "KVPool": ".pool",
    "LoadedModel": ".loader",
    "ModelSpec": ".spec",
    "Result": ".types",
    "Reuse": ".types",
    "ReusedSpan": ".types",
    "Rope": ".rope",
    "RowSelector": ".types",
    "SamplingParams": ".types",
    "load_model": ".loader",
}

__all__ = [
    "ChatTokenizer",
    "ChunkMark",
    "Delta",
    "Encoded",
    "Engine",
    "EngineService",
    "GenerationRequest",
    "Grammar",
    "KVBlock",
    "KVPool",
    "LoadedModel",
    "ModelSpec",
    "Result",
    "Reuse",
    "ReusedSpan",
    "Rope",
    "RowSelector",
    "SamplingParams",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
