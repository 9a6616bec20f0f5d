"""Whose chunks are whose: the salts of chunk keys. Set here, never by a client.

What clients send is their tenant's. What a collection holds is the collection's where the policy file makes it public,
for all who may retrieve from it; otherwise it is, too, of the tenant for whom it was retrieved.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..policies import PolicySet

_TENANT_DIGITS = 32  # of the digest of an API key, as Caller.tenant has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Salts:
    """`public`: globs of the names of public collections. `tenants`: those whose keys the policy file lists."""

    public: tuple[str, ...] = ("*",)
    tenants: tuple[str, ...] = ()

    @classmethod
    def of(cls, policy_set: PolicySet) -> "Salts":
        """Where the file lists no API keys there are no tenants to keep apart, and all collections are public."""
        keys = policy_set.key_digests()
        public = policy_set.collections.public if policy_set.server.api_keys else ("*",)
        return cls(public=public, tenants=tuple(key[:_TENANT_DIGITS] for key in keys))

    def tenant(self, tenant: str) -> str:
        """The salt of what a tenant sends."""
        return f"tenant:{tenant}"

    def retrieved(self, collection: str, *, tenant: str) -> str:
        """The salt of what was retrieved from a collection for a tenant."""
        return self.ingested(collection) or self.tenant(tenant)

    def ingested(self, collection: str) -> str | None:
        """The salt under which a collection's chunks are computed ahead; None where each tenant has its own."""
        is_public = any(fnmatchcase(collection, pattern) for pattern in self.public)
        return f"collection:{collection}" if is_public else None

    def everywhere(self, collection: str) -> tuple[str, ...]:
        """All salts under which a collection's chunks may be stored."""
        return f"collection:{collection}", *(self.tenant(tenant) for tenant in ("", *self.tenants))
