"""The section `server`: the HTTP server, its limits and its keys."""

from typing import Annotated, Literal

from pydantic import Field

from ..fields import Items, Seconds, Text
from ..sizes import Bytes
from .base import Spec
from .keys import ApiKeySpec, CountersSpec, LimitsSpec


class ResponsesSpec(Spec):
    """What is kept of /v1/responses: for each API key at most `count` responses of `bytes` together, over all keys at
    most `total` bytes, each for `age` seconds after its last use. What was used longest ago goes first.
    """

    count: Annotated[int, Field(ge=0)] = 1000
    bytes: Bytes = 64 * 2**20
    total: Bytes = 256 * 2**20
    age: Annotated[float, Field(gt=0)] = 86_400.0


class OriginalsSpec(Spec):
    """What is kept of texts that were rewritten under policies with `originals`: at most `bytes` for each API key and
    `total` over all keys, in memory, each for `age` seconds after its last use.
    """

    bytes: Bytes = 16 * 2**20
    total: Bytes = 64 * 2**20
    age: Annotated[float, Field(gt=0)] = 3600.0


class SummariesSpec(Spec):
    """Summaries that were made, kept by content for each API key: `bytes` in memory, and `disk` bytes in a file at
    `path` where one is named, each for `age` seconds after its last use.
    """

    bytes: Bytes = 16 * 2**20
    disk: Bytes = 256 * 2**20
    path: Text | None = None
    age: Annotated[float, Field(gt=0)] = 30 * 86_400.0


class RecordsSpec(Spec):
    """What the page at /ui has of single requests, in memory: for each API key the last `count` of at most `bytes`
    together, over all keys at most `total` bytes. With `text` prompts are kept with their text, else without.
    """

    count: Annotated[int, Field(ge=0)] = 200
    bytes: Bytes = 8 * 2**20
    total: Bytes = 64 * 2**20
    text: bool = False


class LogSpec(Spec):
    """The log on stderr: lines for people, or one JSON object a line."""

    format: Literal["text", "json"] = "text"


class ServerSpec(Spec):
    """The HTTP server and its limits. Without `api_keys` everybody is let in. `answer_cache`: bytes of answers that
    policies with a `cache` keep in memory. `turns`: bytes of rewritten text that are kept so that the next turn of a
    conversation sends the same. `ui`: whether there is a page at /ui.

    `limits` are those of each key, or of all clients together where there are no keys. Without `counters` they are
    counted in this process. `metrics: keyed` asks for a key with the scope `metrics` at /metrics.
    """

    host: Text = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    max_body_bytes: Bytes = 16 * 2**20
    max_depth: Annotated[int, Field(ge=4, le=1000)] = 128
    request_timeout: Seconds = 600.0
    drain_timeout: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    api_keys: Items[ApiKeySpec] = ()
    limits: LimitsSpec = LimitsSpec()
    counters: CountersSpec | None = None
    metrics: Literal["open", "keyed"] = "open"
    responses: ResponsesSpec = ResponsesSpec()
    answer_cache: Bytes = 64 * 2**20
    originals: OriginalsSpec = OriginalsSpec()
    summaries: SummariesSpec = SummariesSpec()
    records: RecordsSpec = RecordsSpec()
    turns: Bytes = 64 * 2**20
    ui: bool = True
    log: LogSpec = LogSpec()
