"""Models by name: a catalogue, its sources and the local cache. Imports no torch; see hub.py for what a name may be.

Blocking throughout; the module functions work on the default cache and the sources that the environment names.
"""

from pathlib import Path

from .hub import ModelEntry, ModelHub, default_root
from .progress import Progress, RichProgress, Silent

__all__ = [
    "ModelEntry",
    "ModelHub",
    "Progress",
    "RichProgress",
    "Silent",
    "catalogue",
    "default_root",
    "pull",
    "resolve",
]


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """See ModelHub.pull."""
    return ModelHub(default_root()).pull(name, progress=progress)


def resolve(name: str) -> Path:
    """See ModelHub.resolve."""
    return ModelHub(default_root()).resolve(name)


def catalogue() -> list[ModelEntry]:
    """See ModelHub.catalogue."""
    return ModelHub(default_root()).catalogue()
