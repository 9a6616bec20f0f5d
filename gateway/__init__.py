"""The gateway: HTTP, the decorator, the command line, and the pipeline that they share. Public names load on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .house import Sluice
    from .server import serve

_LAZY = {"Sluice": ".house", "create_app": ".app", "serve": ".server"}

__all__ = ["Sluice", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
