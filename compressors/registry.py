"""Compressors by name. Lazy: naming or checking one costs the import of its module and never torch.

To add one: write a file with a frozen dataclass that derives from `Compressor` or `TextCompressor`, and enter it here.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from ..prompt import BadRequest
from .base import Compressor

_FACTORIES: dict[str, tuple[str, str]] = {
    "identity": (".identity", "Identity"),
    "lossless": (".lossless", "Lossless"),
    "html": (".structure.html", "Html"),
    "diff": (".structure.diff", "Diff"),
    "code": (".structure.code", "Code"),
    "summarize": (".summary.summarize", "Summarize"),
    "extractive": (".extractive", "Extractive"),
    "perplexity": (".perplexity", "Perplexity"),
    "classifier": (".classifier", "Classifier"),
}


def names() -> tuple[str, ...]:
    """All known names."""
    return tuple(_FACTORIES)


def option_names(name: str) -> tuple[str, ...]:
    """The options that compressor `name` takes. BadRequest for an unknown name."""
    return tuple(item.name for item in fields(_load(name)))


def create(name: str, options: Mapping[str, Any] | None = None) -> Compressor:
    """Make a compressor. BadRequest, with `param` set to the option, for an unknown name, option or a bad value."""
    compressor = _load(name)
    known = [item.name for item in fields(compressor)]
    for key in options or {}:
        if key not in known:
            raise BadRequest(f"compressor {name!r} has no option {key!r}{_nearest(str(key), known)}", param=str(key))
    return compressor(**(options or {}))


def _load(name: str) -> type[Compressor]:
    if name not in _FACTORIES:
        raise BadRequest(f"there is no compressor {name!r}{_nearest(str(name), _FACTORIES)}", param="use")
    module, attribute = _FACTORIES[name]
    return getattr(import_module(module, __package__), attribute)


def _nearest(word: str, known: Collection[str]) -> str:
    close = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
