"""The command line. `app` is built on first use; every command imports what it needs only when it runs."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .root import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .root import app

    return app
