"""The counters that a policy file asks for. The package redis is imported only where one is named."""

from ...policies import PolicySet
from .counters import Counters, MemoryCounters
from .key_metrics import KeyMetrics


def counters_of(policy_set: PolicySet, metrics: KeyMetrics) -> Counters:
    """Of this process, or of the server that several gateways share. ConfigError where that cannot be used."""
    spec = policy_set.server.counters
    if spec is None:
        return MemoryCounters()
    from .guarded import GuardedCounters
    from .shared import SharedCounters, connect

    client = connect(spec.url, password=policy_set.counters_password(), timeout_s=spec.timeout)
    return GuardedCounters(SharedCounters(client), fail=spec.fail, metrics=metrics)
