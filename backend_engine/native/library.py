"""The compiled library of this machine, found or made once a process."""

import ctypes
import logging
import time
from dataclasses import dataclass
from functools import cache

from . import compiling
from .bindings import functions
from .compiling import Unavailable

logger = logging.getLogger(__name__)

__all__ = ["Library", "Unavailable", "native_library"]


@dataclass(frozen=True, slots=True)
class Library:
    """`lanes` is how many float32 one of its vectors has."""

    functions: ctypes.CDLL
    lanes: int


def native_library() -> Library:
    """Compile the library, where the machine has not done so before, and load it. Raises Unavailable, each time."""
    found = _found()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@cache
def _found() -> Library | str:
    """The library, or why there is none."""
    began = time.perf_counter()
    try:
        path = compiling.compiled(
            folder=compiling.default_folder(), compiler=compiling.compiler(), flags=compiling.flags()
        )
        loaded = functions(path)
        loaded.promptsluice_share_threads(openmp())
    except (Unavailable, OSError) as error:
        return str(error)
    logger.info("compiled step %s ready after %.1f s", path, time.perf_counter() - began)
    return Library(loaded, loaded.promptsluice_lanes())


def openmp() -> int | None:
    """Where the function lies that runs work on the threads of torch's OpenMP; None if it has another one, or none.

    Its threads spin for a while after each of torch's operations, so that threads beside them would share processors.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def forget() -> None:
    """Look for the library anew the next time."""
    _found.cache_clear()
