"""`promptsluice kv`: the store of chunk KV on disk. What a running gateway holds in RAM is in its /metrics."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import bars, err, out, size
from .serve import Config, hub_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...kv_reuse import ChunkStore
    from ...policies import EmbeddedBackend, PolicySet

app = typer.Typer(help="Stored KV of chunks.", no_args_is_help=True)


@app.command()
def status(config: Config = None) -> None:
    """Show where the store lies, how many chunks it holds, and how full it is."""
    from rich.table import Table

    from ...policies import PolicySet
    from ...prompt import PromptsluiceError

    policies = PolicySet.load(config)
    if not policies.kv_cache.disk:
        raise PromptsluiceError("this policy file keeps no KV on disk (kv_cache.disk is 0)")
    out().print(f"folder: {policies.kv_cache_path}")
    table = Table("tier", "chunks", "size", "budget", "full", box=None)
    for tier in disk_store(policies).stats():
        table.add_row(
            tier.tier, str(tier.entries), size(tier.bytes), size(tier.budget), f"{tier.bytes / tier.budget:.0%}"
        )
    out().print(table)


@app.command()
def warm(
    collection: Annotated[str, typer.Argument(help="Name of the collection.")],
    config: Config = None,
) -> None:
    """Compute and store the KV of a collection's chunks that are not stored yet. Can be interrupted and run again."""
    from .collections import opened, ready

    policies = ready(config)
    err().print(warmed(policies, opened(policies).get(collection).pieces()))


def disk_store(policies: "PolicySet") -> "ChunkStore":
    """The part of the chunk store that outlives a process."""
    from ...kv_reuse import open_store

    return open_store(disk=policies.kv_cache.disk, path=policies.kv_cache_path)


def warmed(policies: "PolicySet", texts: "Sequence[str]") -> str:
    """Compute the texts' KV on every embedded backend, with bars, and say what came of it."""
    from ...policies import EmbeddedBackend

    embedded = {name: spec for name, spec in policies.backends.items() if isinstance(spec, EmbeddedBackend)}
    if not policies.kv_cache.disk or not embedded or not texts:
        return "no KV to compute: " + (
            "the policy file has no embedded backend" if not embedded
            else "there are no chunks" if not texts
            else "the policy file keeps none on disk (kv_cache.disk is 0)"
        )  # fmt: skip
    store = disk_store(policies)
    hub = hub_of(policies)
    return "\n".join(
        f"{name}: {_warmed(spec, hub.resolve(spec.model), store, texts)}" for name, spec in embedded.items()
    )


def _warmed(spec: "EmbeddedBackend", path: Path, store: "ChunkStore", texts: "Sequence[str]") -> str:
    from ..backends.engine_room import EngineRoom

    room = EngineRoom.open(spec, path=path, store=store)
    try:
        ids = [room.tokenizer.encode_plain(text) for text in texts]
        with bars(unit="chunks") as shown:
            task = shown.add_task(f"computing KV with {spec.model}", total=None)
            done = room.reuser.warm(ids, progress=lambda at, of: shown.update(task, completed=at, total=of))
    finally:
        room.service.stop(0)
    return f"{done.computed} computed, {done.present} there before, {done.skipped} too short, {done.refused} refused"
