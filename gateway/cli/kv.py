"""`promptsluice kv`: the store of chunk KV on disk. What a running gateway holds in RAM is in its /metrics."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import bars, err, out, size
from .serve import Config, hub_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...kv_reuse import ChunkStore
    from ...kv_reuse.gate import Interval
    from ...kv_reuse.rounding import ChunkDtype
    from ...policies import EmbeddedBackend, PolicySet

app = typer.Typer(help="Stored KV of chunks.", no_args_is_help=True)


@app.command()
def status(config: Config = None) -> None:
    """Show where the store lies, how many chunks it holds, how full it is, and what blends were seen to lose."""
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
    _show_blends(policies.kv_cache_path)


@app.command()
def warm(
    collection: Annotated[str, typer.Argument(help="Name of the collection.")],
    config: Config = None,
) -> None:
    """Compute and store the KV of a collection's chunks that are not stored yet, all of them after a change of model.

    Can be interrupted and run again: what was computed is kept.
    """
    from .collections import opened, ready

    policies = ready(config)
    err().print(warmed(policies, collection, opened(policies).get(collection).pieces()))


def disk_store(policies: "PolicySet") -> "ChunkStore":
    """The chunk files of this machine."""
    from ...kv_reuse import open_store

    return open_store(disk=policies.kv_cache.disk, path=policies.kv_cache_path)


def warmed(policies: "PolicySet", collection: str, texts: "Sequence[str]") -> str:
    """Compute the texts' KV on every embedded backend, with bars, and say what came of it."""
    from ..salts import Salts

    salt = Salts.of(policies).ingested(collection)
    if salt is None or not policies.kv_cache.disk or not _embedded(policies) or not texts:
        return "no KV to compute: " + (
            "the policy file has no embedded backend" if not _embedded(policies)
            else "there are no chunks" if not texts
            else "the policy file keeps none on disk (kv_cache.disk is 0)" if not policies.kv_cache.disk
            else f"{collection} is not in collections.public: each API key's is computed when it asks"
        )  # fmt: skip
    from ..stores import lasting_store

    store, hub = lasting_store(policies), hub_of(policies)
    return "\n".join(
        f"{name}: {_warmed(spec, hub.resolve(spec.model), store, texts, salt, policies.kv_cache.chunk_dtype)}"
        for name, spec in _embedded(policies).items()
    )


def forgotten(policies: "PolicySet", collection: str, texts: "Sequence[str]") -> None:
    """Delete the stored KV of chunks that a collection has no more; no model is loaded for that."""
    if not (policies.kv_cache.disk or policies.kv_cache.shared) or not _embedded(policies):
        return
    from ...backend_engine import ChatTokenizer
    from ...backend_engine.loader import fingerprint_of
    from ...backend_engine.rounded_kv import kv_fingerprint
    from ...kv_reuse import KeySpace
    from ...kv_reuse.rounding import chunk_fingerprints
    from ...prompt import ModelUnavailable
    from ..backends.engine_room import device_of
    from ..salts import Salts
    from ..stores import lasting_store

    store = lasting_store(policies)
    for spec in _embedded(policies).values():
        try:
            path = hub_of(policies).resolve(spec.model)
        except ModelUnavailable as error:
            typer.echo(f"warning: the chunks' KV stays until it is evicted: {error}", err=True)
            continue
        fingerprint = fingerprint_of(path, dtype=spec.dtype, device=device_of(spec), quantize=spec.quantize)
        tokenizer = ChatTokenizer(path)
        chunks = [tokenizer.encode_plain(text) for text in texts]
        spaces = [
            KeySpace(kind, salt)
            for salt in Salts.of(policies).everywhere(collection)
            for kind in chunk_fingerprints(kv_fingerprint(fingerprint, spec.kv_dtype))
        ]
        store.delete_all({space.key(ids).digest for space in spaces for ids in chunks})


def _show_blends(folder: Path) -> None:
    from rich.table import Table

    from ...kv_reuse.gate import load_standings

    table = Table("model", "collection", "checks", "KL, nats", "agreement", "blending", box=None)
    for path in sorted(folder.glob("blends-*.json")):
        model, dash, kind = path.stem.removeprefix("blends-").partition("-")
        for name, one in sorted(load_standings(path).items()):
            state = "off" if one.off else f"at least {one.least:.0%}" if one.least else "by policy"
            seen = (str(one.checked), _shown(one.kl), _shown(one.agreement))
            table.add_row(f"{model[:8]}{dash}{kind}", name or "(sent by clients)", *seen, state)
    if table.row_count:
        out().print(table)


def _shown(interval: "Interval | None") -> str:
    """A mean and its 95 % interval; one check has none."""
    if interval is None:
        return "-"
    half = interval.high - interval.mean
    return f"{interval.mean:.3f} ± {half:.3f}" if math.isfinite(half) else f"{interval.mean:.3f}, once"


def _embedded(policies: "PolicySet") -> "dict[str, EmbeddedBackend]":
    from ...policies import EmbeddedBackend

    return {name: spec for name, spec in policies.backends.items() if isinstance(spec, EmbeddedBackend)}


def _warmed(
    spec: "EmbeddedBackend",
    path: Path,
    store: "ChunkStore",
    texts: "Sequence[str]",
    salt: str,
    chunk_dtype: "ChunkDtype",
) -> str:
    from ..backends.engine_room import EngineRoom

    room = EngineRoom.open(spec, path=path, store=store, chunk_dtype=chunk_dtype)
    try:
        ids = [room.tokenizer.encode_plain(text) for text in texts]
        with bars(unit="chunks") as shown:
            task = shown.add_task(f"computing KV with {spec.model}", total=None)
            done = room.reuser.warm(ids, salt=salt, progress=lambda at, of: shown.update(task, completed=at, total=of))
    finally:
        room.service.stop(0)
    kept = f"{done.computed} computed, {done.present} there before"
    return f"{kept}, {done.skipped} too short or too long, {done.refused} refused"
