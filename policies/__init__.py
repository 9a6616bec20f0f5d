"""Policies: what may be done to whom, and the plan for one request. Imports no torch."""

from .costs import CostModel, Line, Measurement
from .dry_run import Explanation, explain
from .ledger import Ledger
from .load import PolicyFileError
from .match import POLICY_HEADER, Resolution
from .openness import opened
from .planner import plan
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
from .steps import Action, Decision, Plan, Step

__all__ = [
    "POLICY_HEADER",
    "PRESETS",
    "Action",
    "ApiKeySpec",
    "Backend",
    "CompressSpec",
    "CostModel",
    "Decision",
    "EmbeddedBackend",
    "Explanation",
    "Ledger",
    "Line",
    "Measurement",
    "OpenAIBackend",
    "Plan",
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
    "Step",
    "explain",
    "opened",
    "plan",
]
