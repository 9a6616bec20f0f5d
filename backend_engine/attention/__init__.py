"""Attention backends by name, loaded when asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

from ...prompt.errors import ConfigError

if TYPE_CHECKING:
    from .base import AttentionBackend

BACKENDS = {
    "sdpa": (".sdpa", "SdpaAttention"),
    "triton": (".paged", "TritonAttention"),
}


def attention_backend(name: str) -> "AttentionBackend":
    """Make the backend called `name`. Raises ConfigError that lists the known names."""
    if name not in BACKENDS:
        raise ConfigError(f"attention backend {name!r} is not known; known: {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name]
    return getattr(import_module(module, __name__), attribute)()


def default_backend(device_type: str) -> str:
    """The backend for a device, by torch's name of its type."""
    return "triton" if device_type == "cuda" else "sdpa"
