"""What makes a folder a model in Hugging Face layout: a config and all of its safetensors weights."""

import json
from pathlib import Path

from .catalogue import ModelKind

INDEX = "model.safetensors.index.json"


def missing_part(folder: Path) -> str | None:
    """The first thing that the folder lacks to be a model, None if it is complete."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if (folder / INDEX).is_file():
        return next((name for name in shards(folder) if not (folder / name).is_file()), None)
    if not any(folder.glob("*.safetensors")):
        return "safetensors weights"
    return None


def shards(folder: Path) -> list[str]:
    """File names of a sharded model's parts, from its index; an unreadable index counts as a missing part."""
    try:
        return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"readable {INDEX}"]


def kind_of(folder: Path) -> ModelKind:
    """Sentence-transformers models carry a `modules.json`; everything else is taken for a chat model."""
    return "embedding" if (folder / "modules.json").is_file() else "chat"
