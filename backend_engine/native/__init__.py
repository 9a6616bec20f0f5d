"""Steps of few rows on a CPU as one call into C++ that is compiled once on each machine: see docs/backend_engine.md."""

from .library import Library, Unavailable, native_library
from .steps import NativeSteps, checked

__all__ = ["Library", "NativeSteps", "Unavailable", "checked", "native_library"]
