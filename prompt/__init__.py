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
from .usage import Report, StepReport, Usage

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
    "Prompt",
    "PromptsluiceError",
    "Protection",
    "Report",
    "Segment",
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
