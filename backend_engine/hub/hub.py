"""Models by name: `pull` brings one into the local cache, `resolve` finds it there offline, `catalogue` lists.

A name is one of: a catalogue name, a folder in Hugging Face layout, a GGUF file, or a hub id (`organisation/name`).
Everything here blocks; call it from a worker thread.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...prompt import ModelUnavailable, UnknownModel
from . import manifest as manifests
from .catalogue import CATALOGUE, ModelCard, ModelKind
from .install import disk_errors, exclusive, install, require_space
from .layout import kind_of, missing_part
from .manifest import Manifest
from .progress import Progress, Silent
from .sources import Source, SourceUnavailable, default_sources

# The hub has no "--" in its ids, which leaves it to us for the slash in a folder's name.
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A line of the list. `origin` and `weights` say what is installed, `bytes` how much of the disk it takes."""

    name: str
    kind: ModelKind
    sources: tuple[str, ...]
    state: Literal["ready", "absent", "broken"]
    origin: str
    weights: str
    bytes: int
    path: Path


def default_root() -> Path:
    """`$XDG_CACHE_HOME/promptsluice/models`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "promptsluice" / "models"


class ModelHub:
    """A model cache at `root`, filled from `sources` in order (None: as the environment says, at each pull)."""

    def __init__(self, root: Path, *, sources: Sequence[Source] | None = None, lock_wait_s: float = 900.0) -> None:
        self.root = root
        self._sources = sources
        self._lock_wait_s = lock_wait_s

    def pull(self, name: str, *, progress: Progress | None = None) -> Path:
        """The model's folder (or GGUF file), fetched if it is not there or damaged.

        Raises UnknownModel, ModelUnavailable (no source could deliver, each with its reason) and StorageFull; then the
        cache is as it was. A complete model costs a look at its files' sizes and time stamps.
        """
        if local := _local(name):
            return local
        card = _card(name)
        progress = progress or Silent()
        if self._state(card, deep=True)[1] is None:
            return self._path(card)
        with disk_errors(self.root), exclusive(self.root, _folder(card), wait_s=self._lock_wait_s, progress=progress):
            if self._state(card, deep=True)[1] is None:  # somebody else pulled it while we waited
                return self._path(card)
            require_space(self.root, card.peak_bytes)
            return self._fetch(card, progress)

    def resolve(self, name: str) -> Path:
        """The model's folder (or GGUF file). Never uses the network; raises UnknownModel or ModelUnavailable."""
        if local := _local(name):
            return local
        card = _card(name)
        _, problem = self._state(card, deep=False)
        if problem is not None:
            raise ModelUnavailable(f"the model {name} is not here ({problem}); run: promptsluice models pull {name}")
        return self._path(card)

    def catalogue(self) -> list[ModelEntry]:
        """The catalogue's models and those that were pulled by hub id, with their state in this cache."""
        cards = list(CATALOGUE.values())
        for path in sorted(self.root.glob("*--*")):
            found = manifests.read(path)
            cards.append(ModelCard(name=found.name, kind=found.kind, hub_id=found.name)) if found else None
        return [self._entry(card) for card in cards]

    def _entry(self, card: ModelCard) -> ModelEntry:
        found, problem = self._state(card, deep=False)
        state = "ready" if problem is None else "broken" if os.path.exists(self._path(card)) else "absent"
        return ModelEntry(
            name=card.name,
            kind=card.kind or (found.kind if found else "chat"),
            sources=card.source_names,
            state=state,
            origin=found.provenance.origin if found else "",
            weights=found.provenance.weights if found else "",
            bytes=found.bytes if found else 0,
            path=self._path(card),
        )

    def _path(self, card: ModelCard) -> Path:
        return self.root / _folder(card)

    def _state(self, card: ModelCard, *, deep: bool) -> tuple[Manifest | None, str | None]:
        """The model's manifest and what is wrong with the model (None: nothing)."""
        path = self._path(card)
        if not os.path.exists(path):  # of a folder without permission, too, this says no; pathlib's raises
            return None, "not pulled yet"
        found = manifests.read(path)
        if found is None:
            return None, "its manifest is missing or not readable"
        return found, manifests.damage(path, found, deep=deep)

    def _fetch(self, card: ModelCard, progress: Progress) -> Path:
        reasons = []
        for source in self._sources if self._sources is not None else default_sources():

            def build(into: Path, scratch: Path, source: Source = source) -> Manifest:
                provenance = source.fetch(card, into, scratch=scratch, progress=progress)
                progress.stage("verifying and storing")
                return Manifest(name=card.name, kind=card.kind or kind_of(into), provenance=provenance, files={})

            try:
                return install(self.root, _folder(card), build=build)
            except SourceUnavailable as reason:
                reasons.append(f"{source.name}: {reason}")
        raise ModelUnavailable(
            f"the model {card.name} cannot be had; " + ("; ".join(reasons) or "no source is configured")
        )


def _folder(card: ModelCard) -> str:
    return card.name.replace("/", "--")


def _local(name: str) -> Path | None:
    """The folder or GGUF file that the name spells out, None if it is no path of an existing one."""
    # os.path instead of pathlib: for any odd string the answer is no, never an exception.
    if name in CATALOGUE or not name:
        return None
    try:
        spelled = os.path.expanduser(name)
    except ValueError:  # "~" before what no user can be called
        return None
    if spelled.endswith(".gguf") and os.path.isfile(spelled):
        return Path(spelled)
    if not os.path.isdir(spelled):
        return None
    path = Path(spelled)
    if missing := missing_part(path):
        raise ModelUnavailable(f"the folder {name} is no complete model: it has no {missing}")
    return path


def _card(name: str) -> ModelCard:
    if name in CATALOGUE:
        return CATALOGUE[name]
    if _HUB_ID.fullmatch(name) and len(name) <= 96 and not name.endswith(".gguf"):
        return ModelCard(name=name, kind=None, hub_id=name)
    known = ", ".join(CATALOGUE)
    raise UnknownModel(f"no model, folder or GGUF file is called {name!r}; known names are {known}, or give a hub id")
