"""promptsluice: prompt and data-layer optimization middleware for LLM inference.

Public names load on first use, so that `import promptsluice` costs nothing and pulls in no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gateway.decorator import optimize
    from .gateway.wrap import wrap

__version__ = "0.1.0"

_LAZY = {
    "optimize": ".gateway.decorator",
    "wrap": ".gateway.wrap",
}

__all__ = ["__version__", "optimize", "wrap"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
