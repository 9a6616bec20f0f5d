"""The section `server`: the HTTP server, its limits and its keys."""

from typing import Annotated

from pydantic import Field, model_validator

from ..fields import EnvironmentName, Items, Seconds, Sha256, Text
from ..sizes import Bytes
from .base import Spec


class ApiKeySpec(Spec):
    """A key that clients may use, by its digest or by the environment variable that holds it."""

    name: Text
    sha256: Sha256 | None = None
    env: EnvironmentName | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "ApiKeySpec":
        if (self.sha256 is None) == (self.env is None):
            raise ValueError("give exactly one of sha256 and env")
        return self


class ResponsesSpec(Spec):
    """What is kept of /v1/responses: for each API key at most `count` responses of `bytes` together, over all keys at
    most `total` bytes, each for `age` seconds after its last use. What was used longest ago goes first.
    """

    count: Annotated[int, Field(ge=0)] = 1000
    bytes: Bytes = 64 * 2**20
    total: Bytes = 256 * 2**20
    age: Annotated[float, Field(gt=0)] = 86_400.0


class ServerSpec(Spec):
    """The HTTP server and its limits. Without `api_keys` everybody is let in. `answer_cache`: bytes of answers that
    policies with a `cache` keep in memory.
    """

    host: Text = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    max_body_bytes: Bytes = 16 * 2**20
    max_depth: Annotated[int, Field(ge=4, le=1000)] = 128
    request_timeout: Seconds = 600.0
    drain_timeout: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    api_keys: Items[ApiKeySpec] = ()
    responses: ResponsesSpec = ResponsesSpec()
    answer_cache: Bytes = 64 * 2**20
