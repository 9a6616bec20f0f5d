"""The error tree: every failure that a user can meet, with its HTTP status and its OpenAI wire form.

    PromptsluiceError            500  server_error
    ├── BadRequest               400  invalid_request_error
    │   ├── ContextTooLong            code context_length_exceeded
    │   └── UnknownPolicy             code policy_not_found
    ├── Unauthorized             401  authentication_error
    ├── Forbidden                403  permission_error
    ├── NotFound                 404  not_found_error
    │   ├── UnknownModel              code model_not_found
    │   └── UnknownCollection         code collection_not_found
    ├── Conflict                 409  conflict_error
    ├── PayloadTooLarge          413  invalid_request_error, code payload_too_large
    ├── RateLimited              429  requests, code rate_limit_exceeded, Retry-After
    │   └── TokensLimited             type tokens
    ├── ConfigError                   a policy file: file, line
    ├── UpstreamError            502  upstream_error
    ├── UpstreamTimeout          504  upstream_error, code upstream_timeout
    ├── Overloaded               503  overloaded_error, Retry-After
    ├── ModelUnavailable         503  the weights are not here and cannot be had
    ├── StorageFull              507  storage_full
    └── PolicyNotApplied         500  code policy_not_applied

Foreign errors (httpx, OSError, pydantic, torch) are translated into these at the seam where they arise, `from exc`.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar


class PromptsluiceError(Exception):
    """Base of all our errors. `message` is for a person; `param` names the request field, `code` is a stable slug.

    `headers` are response headers that belong to the error, such as Retry-After.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.headers = dict(headers or {})

    def to_wire(self) -> dict[str, Any]:
        """The OpenAI error object: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(PromptsluiceError):
    """The request cannot be understood or asks for what cannot be honoured; the client has to change it."""

    status = 400
    type = "invalid_request_error"


class ContextTooLong(BadRequest):
    """The prompt does not fit into the model's context."""

    default_code = "context_length_exceeded"


class UnknownPolicy(BadRequest):
    """The named policy is not in the policy file and is no preset."""

    default_code = "policy_not_found"


class Unauthorized(PromptsluiceError):
    """No key, or a key that is not known."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(PromptsluiceError):
    """The key is known but may not do this."""

    status = 403
    type = "permission_error"


class NotFound(PromptsluiceError):
    """The named thing does not exist."""

    status = 404
    type = "not_found_error"


class UnknownModel(NotFound):
    """No backend serves a model of this name."""

    type = "invalid_request_error"
    default_code = "model_not_found"


class UnknownCollection(NotFound):
    """No collection of this name has been created."""

    default_code = "collection_not_found"


class Conflict(PromptsluiceError):
    """The thing to be created exists already, or is being changed by somebody else."""

    status = 409
    type = "conflict_error"


class PayloadTooLarge(PromptsluiceError):
    """The body is larger than the configured limit."""

    status = 413
    type = "invalid_request_error"
    default_code = "payload_too_large"


class RateLimited(PromptsluiceError):
    """A key has used up what it may do. `retry_after` (seconds) becomes the Retry-After header; None: never.

    The types `requests` and `tokens` are OpenAI's own.
    """

    status = 429
    type = "requests"
    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float | None) -> None:
        wait = {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}
        super().__init__(message, headers=wait)
        self.retry_after = retry_after


class TokensLimited(RateLimited):
    """The same for tokens."""

    type = "tokens"


class ConfigError(PromptsluiceError):
    """A policy file is wrong; the message begins with `file:line:` where the line is known."""

    default_code = "invalid_config"

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        where = "".join(f"{part}:" for part in (file, line) if part is not None)
        super().__init__(f"{where} {message}" if where else message)
        self.file = file
        self.line = line


class UpstreamError(PromptsluiceError):
    """The upstream server could not be reached or answered nonsense."""

    status = 502
    type = "upstream_error"
    default_code = "upstream_error"


class UpstreamTimeout(PromptsluiceError):
    """The upstream server did not answer in the configured time."""

    status = 504
    type = "upstream_error"
    default_code = "upstream_timeout"


class Overloaded(PromptsluiceError):
    """There is no room for the request now. `retry_after` (seconds) becomes the Retry-After header."""

    status = 503
    type = "overloaded_error"
    default_code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message, headers={"retry-after": str(max(1, math.ceil(retry_after)))})
        self.retry_after = retry_after


class ModelUnavailable(PromptsluiceError):
    """The weights are neither in the cache nor to be had from any source; the message says what to run."""

    status = 503
    default_code = "model_unavailable"


class StorageFull(PromptsluiceError):
    """The disk is full; nothing was changed."""

    status = 507
    default_code = "storage_full"


class PolicyNotApplied(PromptsluiceError):
    """A step of the policy failed or was late, and the request's route lets nothing through without it."""

    default_code = "policy_not_applied"
