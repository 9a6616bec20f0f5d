"""The section `backends`: who answers."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..fields import BaseURL, EnvironmentName, Items, Seconds, Text
from ..sizes import Bytes
from .base import Spec


class PrefixDiskSpec(Spec):
    """A folder for prefixes that left memory, and how many bytes it may hold; gateways may share it."""

    path: Text | None = None
    size: Bytes = 16 * 2**30


class PrefixCacheSpec(Spec):
    """Where prefixes go that find no room in `kv_memory`: host memory, then disk, which needs some of it.

    `host` None is 4 GiB on a GPU. On a CPU `kv_memory` is host memory already, so it is 0 there, or 256 MiB for a disk.
    """

    host: Bytes | None = None
    disk: PrefixDiskSpec | None = None

    @model_validator(mode="after")
    def _disk_needs_host(self) -> "PrefixCacheSpec":
        if self.disk is not None and self.disk.size and self.host == 0:
            raise ValueError("disk needs some host memory, which its pages pass through")
        return self


class FallbackSpec(Spec):
    """Another backend, and the name that the model has there; by default the same."""

    backend: Text
    model: Text | None = None


class EmbeddedBackend(Spec):
    """Our own engine in this process. `quantize` is how weights are held, `kv_dtype` how KV is; `kv_memory` in bytes;
    `step_tokens` is the token budget of one engine step (None: by the device).

    While streams run, a step with prefills shall take about `stall` times as long as one without. At most `queue`
    requests wait, with at most `queue_tokens` tokens, for at most `queue_timeout` seconds.
    `guessed_tokens`: how many tokens are guessed ahead at most, 0 for none; by default as the device is good for.
    `native`: on a CPU, steps of few rows run through C++ that is compiled when the machine first needs it.
    `generation_config`: whether the sampling that the model's file of that name recommends holds for requests that name
    none.
    """

    kind: Literal["embedded"]
    model: Text = "smollm2-135m-instruct"
    served_name: Text | None = None
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16"] = "auto"
    quantize: Literal["none", "int8", "int4", "fp8"] = "none"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    context_limit: Annotated[int, Field(gt=0)] | None = None
    kv_memory: Bytes = 2 * 2**30
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    prefix_cache: PrefixCacheSpec = PrefixCacheSpec()
    step_tokens: Annotated[int, Field(ge=16)] | None = None
    stall: Annotated[float, Field(gt=1)] = 2.5
    max_running: Annotated[int, Field(ge=1)] = 32
    queue: Annotated[int, Field(ge=1)] = 256
    queue_tokens: Annotated[int, Field(ge=1)] = 2**20
    queue_timeout: Seconds = 300.0
    guessed_tokens: Annotated[int, Field(ge=0, le=64)] | None = None
    native: bool = True
    threads: Annotated[int, Field(ge=1)] | None = None
    fallbacks: Items[FallbackSpec] = ()
    generation_config: Literal["model", "none"] = "model"

    @property
    def models(self) -> tuple[str, ...]:
        """The names that clients call it by: the served name, else the model's (of a directory, its last part)."""
        local = self.model.startswith(("/", "./", "../", "~"))
        return (self.served_name or (self.model.rstrip("/").rpartition("/")[2] if local else self.model),)


class Timeouts(Spec):
    """Seconds for each phase of an upstream call; `read` is the longest silence between two pieces of an answer."""

    connect: Seconds = 5.0
    read: Seconds = 600.0
    write: Seconds = 60.0
    pool: Seconds = 10.0


class UpstreamServer(Spec):
    """One of several servers of a backend, which serve the same models; a share of the requests by its `weight`."""

    base_url: BaseURL
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0


class BreakerSpec(Spec):
    """After `failures` in a row (0: never) a server is left alone for `cooldown` seconds; then one request tries it."""

    failures: Annotated[int, Field(ge=0)] = 5
    cooldown: Seconds = 5.0


class OpenAIBackend(Spec):
    """Any OpenAI-compatible server, or several of them. Without `models` it takes every model that nobody else serves.

    Of several, `balance` chooses: by weight, or also by prefix, so that a conversation stays with the server that has
    its beginning cached.

    `tokenizer` (a catalogue name or directory) is used to count prompt tokens; without it counts are estimates.
    `fallbacks` are asked in their order, once each, while nothing of an answer has been sent.
    `messages`: whether bodies of Anthropic's Messages API go to it as chats, or as they came, to `base_url`/messages,
    with the key in the header `messages_key`.
    `stream_usage`: whether streams that are charged to limits of tokens are asked for their usage, too, if their client
    does not ask; off for old servers that refuse `stream_options`, whose streams are then charged by estimate.
    """

    kind: Literal["openai"]
    base_url: BaseURL | None = None
    servers: Items[UpstreamServer] = ()
    balance: Literal["weight", "prefix"] = "weight"
    breaker: BreakerSpec = BreakerSpec()
    api_key_env: EnvironmentName | None = None
    models: Items[Text] = ()
    tokenizer: Text | None = None
    timeouts: Timeouts = Timeouts()
    max_connections: Annotated[int, Field(ge=1)] = 256
    messages: Literal["translated", "native"] = "translated"
    messages_key: Literal["x-api-key", "authorization"] = "x-api-key"
    stream_usage: bool = True
    fallbacks: Items[FallbackSpec] = ()

    @model_validator(mode="after")
    def _somewhere(self) -> "OpenAIBackend":
        if (self.base_url is None) == (not self.servers):
            raise ValueError("needs exactly one of base_url and servers")
        urls = [server.base_url for server in self.servers]
        if len(set(urls)) < len(urls):
            raise ValueError("servers name a base_url twice; give it a larger weight")
        return self

    @property
    def all_servers(self) -> tuple[UpstreamServer, ...]:
        """The one at `base_url`, or those of `servers`."""
        return self.servers if self.base_url is None else (UpstreamServer(base_url=self.base_url),)


Backend = EmbeddedBackend | OpenAIBackend
DEFAULT_BACKEND = "local"
"""The name of the one backend of a file that defines none: our engine with its default model."""
