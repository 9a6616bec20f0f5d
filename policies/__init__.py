"""Policies: what may be done to whom, and the plan for one request. Imports no torch."""

from .load import PolicyFileError
from .match import POLICY_HEADER, Resolution
from .policyset import PolicySet
from .presets import PRESETS
from .schema import (
    ApiKeySpec,
    Backend,
    CompressSpec,
    EmbeddedBackend,
    OpenAIBackend,
    Policy,
    ProtectSpec,
    QualitySpec,
    RetrieveSpec,
    ReuseSpec,
    RouteSpec,
    ServerSpec,
)

__all__ = [
    "POLICY_HEADER",
    "PRESETS",
    "ApiKeySpec",
    "Backend",
    "CompressSpec",
    "EmbeddedBackend",
    "OpenAIBackend",
    "Policy",
    "PolicyFileError",
    "PolicySet",
    "ProtectSpec",
    "QualitySpec",
    "Resolution",
    "RetrieveSpec",
    "ReuseSpec",
    "RouteSpec",
    "ServerSpec",
]
