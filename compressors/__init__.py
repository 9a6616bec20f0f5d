"""Compressors: text in, less text out. Names load on first use; none of them needs torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Compressor, Job, Task, TextCompressor
    from .context import CompressionContext, Score
    from .protect import CATEGORIES, protected_spans
    from .registry import create, names, option_names
    from .result import Change, Compression, Rewrite, Span

_LAZY = {
    "CATEGORIES": ".protect",
    "Change": ".result",
    "Compression": ".result",
    "CompressionContext": ".context",
    "Compressor": ".base",
    "Job": ".base",
    "Rewrite": ".result",
    "Score": ".context",
    "Span": ".result",
    "Task": ".base",
    "TextCompressor": ".base",
    "create": ".registry",
    "names": ".registry",
    "option_names": ".registry",
    "protected_spans": ".protect",
}

__all__ = [
    "CATEGORIES",
    "Change",
    "Compression",
    "CompressionContext",
    "Compressor",
    "Job",
    "Rewrite",
    "Score",
    "Span",
    "Task",
    "TextCompressor",
    "create",
    "names",
    "option_names",
    "protected_spans",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
