"""The policy file, version 1, as strict pydantic models: what may stand in it, with its defaults.

Frozen, and used inside as they are; unknown keys and wrong types are errors. References between parts (policy names,
backends, compressors) are checked in references.py, and secrets have no field here at all: only the name of an
environment variable or a SHA-256 digest.
"""

from .backends import (
    DEFAULT_BACKEND,
    Backend,
    BreakerSpec,
    EmbeddedBackend,
    FallbackSpec,
    OpenAIBackend,
    PrefixCacheSpec,
    PrefixDiskSpec,
    Timeouts,
    UpstreamServer,
)
from .base import Spec
from .file import PolicyFile
from .keys import ORDINARY_SCOPES, SCOPES, ApiKeySpec, CountersSpec, LimitsSpec, Scope
from .policy import (
    BudgetSpec,
    CacheSpec,
    CompressSpec,
    KeepOriginalsSpec,
    Policy,
    ProtectSpec,
    QualitySpec,
    RetrieveSpec,
    ReuseSpec,
)
from .routes import MatchSpec, RolloutSpec, RouteSpec, TokenRange
from .server import OriginalsSpec, RecordsSpec, ResponsesSpec, ServerSpec, SummariesSpec
from .stores import CollectionsSpec, KVCacheSpec, ModelsSpec, SharedCacheSpec

__all__ = [
    "DEFAULT_BACKEND",
    "ORDINARY_SCOPES",
    "SCOPES",
    "ApiKeySpec",
    "Backend",
    "BreakerSpec",
    "BudgetSpec",
    "CacheSpec",
    "CollectionsSpec",
    "CompressSpec",
    "CountersSpec",
    "EmbeddedBackend",
    "FallbackSpec",
    "KVCacheSpec",
    "KeepOriginalsSpec",
    "LimitsSpec",
    "MatchSpec",
    "ModelsSpec",
    "OpenAIBackend",
    "OriginalsSpec",
    "Policy",
    "PolicyFile",
    "PrefixCacheSpec",
    "PrefixDiskSpec",
    "ProtectSpec",
    "QualitySpec",
    "RecordsSpec",
    "ResponsesSpec",
    "RetrieveSpec",
    "ReuseSpec",
    "RolloutSpec",
    "RouteSpec",
    "Scope",
    "ServerSpec",
    "SharedCacheSpec",
    "Spec",
    "SummariesSpec",
    "Timeouts",
    "TokenRange",
    "UpstreamServer",
]
