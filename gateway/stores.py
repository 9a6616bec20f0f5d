"""The chunk store that a policy file asks for. Imports torch: for worker threads and the command line."""

from hashlib import blake2b

from ..kv_reuse import ChunkStore, SharedStore, connect, open_store
from ..policies import EmbeddedBackend, PolicySet


def chunk_store(policies: PolicySet) -> ChunkStore:
    """All tiers, the fastest one on the device of the first embedded backend that has one."""
    from .backends.engine_room import device_of

    cache = policies.kv_cache
    devices = [device_of(spec) for spec in policies.backends.values() if isinstance(spec, EmbeddedBackend)]
    return open_store(
        device=cache.device,
        ram=cache.ram,
        disk=cache.disk,
        path=policies.kv_cache_path,
        on=next((device for device in devices if device != "cpu"), "cpu"),
        shared=_shared(policies),
    )


def lasting_store(policies: PolicySet) -> ChunkStore:
    """The tiers that outlive a process."""
    return open_store(disk=policies.kv_cache.disk, path=policies.kv_cache_path, shared=_shared(policies))


def _shared(policies: PolicySet) -> ChunkStore | None:
    spec = policies.kv_cache.shared
    if spec is None:
        return None
    client = connect(spec.url, password=policies.shared_cache_password(), timeout_s=spec.timeout)
    server = blake2b(spec.url.encode(), digest_size=8).hexdigest()  # another one has nothing of what this is to delete
    return SharedStore(client, ttl_s=spec.ttl, undelivered=policies.kv_cache_path / f"undelivered-{server}")
