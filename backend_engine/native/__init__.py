"""Steps of few rows on a CPU as one call into C++ that is compiled once on each machine: see docs/backend_engine.md."""

from .large_pages import move_to_large_pages
from .library import Library, Unavailable, native_library
from .prefill import NativeAttention, NativeOps, NativePrefill
from .products import NativeProducts
from .steps import NativeSteps, checked

__all__ = [
    "Library",
    "NativeAttention",
    "NativeOps",
    "NativePrefill",
    "NativeProducts",
    "NativeSteps",
    "Unavailable",
    "checked",
    "move_to_large_pages",
    "native_library",
]
