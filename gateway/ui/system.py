"""What all requests share, as the page shows it: caches by tier, the quality gate, the controller, servers."""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...policies.schema import OpenAIBackend
from ..backends.base import Backend
from ..house import Sluice

if TYPE_CHECKING:
    from ...kv_reuse.gate import Interval, Standing

_TIER = re.compile(r"kv_(\w+)_(hits|misses|entries|bytes|budget|evictions|corrupt|refused)")
_WAYS = ("untouched", "full", "reuse", "blend")
_ENGINE = (
    "running", "waiting", "pages_total", "pages_free", "pages_cached", "queried_tokens", "cached_tokens",
    "loaded_tokens", "reused_tokens", "recomputed_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens",
    "preemptions", "host_pages_total", "host_pages_cached", "disk_pages", "disk_bytes",
)  # fmt: skip


def system_view(sluice: Sluice) -> dict[str, Any]:
    """As JSON. Blocking: a tier's counters may be on a disk."""
    answers, sums = sluice.rooms.answers.stats(), sluice.rooms.records.since_start()
    count, size = sluice.rooms.records.held(None)
    limits = sluice.policy_set.server.records
    return {
        "backends": [_backend(sluice, name, backend) for name, backend in sluice.backends.items()],
        "bounds": [
            {"policy": name, "max_kl": policy.quality.max_kl, "min_agreement": policy.quality.min_agreement}
            for name, policy in sluice.policy_set.policies.items()
            if policy.reuse.mode == "blend"
        ],
        "answers": {**answers, "hits": sums["hit"], "misses": sums["miss"]},
        "records": {"entries": count, "bytes": size, "budget": limits.total, "text": limits.text},
    }


def _backend(sluice: Sluice, name: str, backend: Backend) -> dict[str, Any]:
    spec, stats = sluice.policy_set.backends.get(name), backend.stats()
    return {
        "name": name,
        "models": [] if spec is None else list(spec.models),
        "not_ready": backend.ready(),
        "healthy": backend.healthy(),
        "engine": {name: stats[name] for name in _ENGINE} if "pages_total" in stats else None,
        "tiers": _tiers(stats),
        "controller": _controller(stats),
        "gate": [_standing(collection, one) for collection, one in backend.blends().items()],
        "servers": _servers(spec, stats) if isinstance(spec, OpenAIBackend) else [],
    }


def _tiers(stats: Mapping[str, float]) -> list[dict[str, Any]]:
    """Of the chunk store, in its order."""
    tiers: dict[str, dict[str, Any]] = {}
    for name, value in stats.items():
        if found := _TIER.fullmatch(name):
            tiers.setdefault(found[1], {"tier": found[1]})[found[2]] = value
    return list(tiers.values())


def _controller(stats: Mapping[str, float]) -> list[dict[str, Any]] | None:
    """How often each way was taken, and of those that are predicted the seconds and how far they were off."""
    if "reuse_decided_full" not in stats:
        return None
    return [
        {
            "way": way,
            "taken": stats[f"reuse_decided_{way}"],
            **{name: stats.get(f"reuse_{name}_{way}") for name in ("predicted_s", "real_s", "correction", "error")},
        }
        for way in _WAYS
    ]


def _standing(collection: str, standing: "Standing") -> dict[str, Any]:
    return {
        "collection": collection,
        "least": standing.least,
        "off": standing.off,
        "checked": standing.checked,
        "dropped": standing.dropped,
        "samples": len(standing.samples),
        "kl": _interval(standing.kl),
        "agreement": _interval(standing.agreement),
    }


def _interval(interval: "Interval | None") -> dict[str, float | None] | None:
    """Bounds that are not known yet are None: infinity is no JSON."""
    if interval is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in interval._asdict().items()}


def _servers(spec: OpenAIBackend, stats: Mapping[str, float]) -> list[dict[str, Any]]:
    """By their host only: a URL might hold a secret."""
    return [
        {
            "host": urlsplit(server.base_url).netloc.rpartition("@")[2],
            "weight": server.weight,
            **{
                name: stats.get(f"server_{place}_{name}", 0.0) for name in ("available", "open", "requests", "failures")
            },
        }
        for place, server in enumerate(spec.all_servers)
    ]
