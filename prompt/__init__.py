"""The vocabulary of the house: prompts, segments, usage and errors. Imports nothing of ours."""

from .cut import Protection
from .errors import (
    BadRequest,
    ConfigError,
    Conflict,
    ContextTooLong,
    Forbidden,
    ModelUnavailable,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    PolicyNotApplied,
    PromptsluiceError,
    StorageFull,
    Unauthorized,
    UnknownCollection,
    UnknownModel,
    UnknownPolicy,
    UpstreamError,
    UpstreamTimeout,
)
from .prompt import Prompt
from .segment import Kind, Path, Segment
from .usage import Report, ShadowReport, StepReport, Usage

__all__ = [
    "BadRequest",
    "ConfigError",
    "Conflict",
    "ContextTooLong",
    "Forbidden",
    "Kind",
    "ModelUnavailable",
    "NotFound",
    "Overloaded",
    "Path",
    "PayloadTooLarge",
    "PolicyNotApplied",
    "Prompt",
    "PromptsluiceError",
    "Protection",
    "Report",
    "Segment",
    "ShadowReport",
    "StepReport",
    "StorageFull",
    "Unauthorized",
    "UnknownCollection",
    "UnknownModel",
    "UnknownPolicy",
    "UpstreamError",
    "UpstreamTimeout",
    "Usage",
]
