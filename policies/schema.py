"""The policy file, version 1, as strict pydantic models: what may stand in it, with its defaults.

Frozen, and used inside as they are; unknown keys and wrong types are errors. References between parts (policy names,
backends, compressors) are checked in references.py, and secrets have no field here at all: only the name of an
environment variable or a SHA-256 digest.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .fields import (
    BaseURL,
    EnvironmentName,
    Items,
    KindName,
    Option,
    PolicyNames,
    RedisURL,
    Seconds,
    Sha256,
    Share,
    Text,
    Version,
)
from .sizes import Bytes


class Spec(BaseModel):
    """Base of all parts of the file: frozen, strict, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


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


_AUTO_RATIO = 0.15

Backend = EmbeddedBackend | OpenAIBackend
DEFAULT_BACKEND = "local"
"""The name of the one backend of a file that defines none: our engine with its default model."""


class RetrieveSpec(Spec):
    """Which collection is searched for the question, and how much of it goes into the prompt."""

    collection: Text = "docs"
    top_k: Annotated[int, Field(ge=1, le=1000)] = 4
    max_tokens: Annotated[int, Field(ge=1)] = 2048


class CompressSpec(Spec):
    """One compressor in the order of use.

    `target_rate` is the share of tokens that stays. `kinds` None means what the compressor is made for. Segments under
    `min_tokens` are left alone (None: the compressor's own bound).
    """

    use: Text
    kinds: Items[KindName] | None = None
    target_rate: Share | None = None
    min_tokens: Annotated[int, Field(ge=1)] | None = None
    options: dict[str, Option] = {}


class ReuseSpec(Spec):
    """How stored KV may be used.

    off: not at all, not even the engine's prefix cache. prefix: the prefix cache only. reuse: chunks as stored,
    nothing repaired. blend: chunks with at least the share `ratio` of their rows recomputed, chosen by `selector`;
    `auto` is 0.15, and more where that takes no longer. More than that, too, where `quality` is not met.
    Text is looked up, and stored, in pieces of at least `min_chunk_tokens`. What is not found is computed in the
    background and stored once it was seen `learn_after` times (0: never), at most `learn_tokens` of each request.
    """

    mode: Literal["off", "prefix", "reuse", "blend"] = "prefix"
    ratio: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    selector: Text = "auto"
    min_chunk_tokens: Annotated[int, Field(ge=1)] = 64
    learn_after: Annotated[int, Field(ge=0, le=16)] = 1
    learn_tokens: Annotated[int, Field(ge=0)] = 8192

    @property
    def least_ratio(self) -> float:
        """The share of rows that is recomputed at least."""
        return _AUTO_RATIO if self.ratio == "auto" else self.ratio


class ProtectSpec(Spec):
    """What no step may rewrite, beyond code, tool schemas, tool calls and the question, which nothing can open.

    `last_user: false` opens the documents inside the user's message, at the price of the prefix cache in later turns.
    """

    system: bool = True
    last_user: bool = True
    roles: Items[Text] = ()
    kinds: Items[KindName] = ()


class CacheSpec(Spec):
    """Whole answers are kept and given again for `ttl` seconds: to requests that are equal in everything, or, from a
    cosine of `similarity` on, to those whose question means the same and that are equal in everything else.
    """

    ttl: Seconds = 3600.0
    similarity: Annotated[float, Field(gt=0, le=1)] | None = None


class QualitySpec(Spec):
    """Bounds on what may be lost. `max_removed`: the share of a segment that lossy steps together may take away.

    Of blended requests the share `sample` is compared with full prefill in idle time. Where their mean KL of the next
    token (nats) is certainly above `max_kl`, or fewer than `min_agreement` of 16 greedy tokens are the same, a
    collection's ratio is raised, and in the end it is not blended any more.
    """

    max_removed: Annotated[float, Field(ge=0, lt=1)] = 0.8
    sample: Annotated[float, Field(ge=0, le=1)] = 0.02
    max_kl: Annotated[float, Field(gt=0)] = 0.25
    min_agreement: Annotated[float, Field(ge=0, le=1)] = 0.0


class Policy(Spec):
    """What may be done to a request. In a file every field is optional, and what is not given comes from `extends`.

    `min_prompt_tokens`: below it nothing is done; it is applied to the prompt up to each segment (see plan.py).
    `token_value_ms`: what a saved prompt token is worth in milliseconds beyond its prefill (a provider's price, for
    example), in the planner's break-even.
    `rewrite_timeout`: seconds that rewriting may take; what is not done by then is left as it was. None: as long as
    what it is predicted to save, between 1 and 10 seconds.
    `allow_client_policy`: which other policies a client may ask for where this one would apply: all, none or a list of
    names (held as ("*",), () or the names).
    """

    extends: Text | None = None
    description: str = ""
    retrieve: RetrieveSpec | None = None
    compress: Items[CompressSpec] = ()
    reuse: ReuseSpec = ReuseSpec()
    protect: ProtectSpec = ProtectSpec()
    quality: QualitySpec = QualitySpec()
    cache: CacheSpec | None = None
    min_prompt_tokens: Annotated[int, Field(ge=0)] = 0
    token_value_ms: Annotated[float, Field(ge=0)] = 0.0
    rewrite_timeout: Seconds | None = None
    allow_client_policy: PolicyNames = ("*",)

    @property
    def passthrough(self) -> bool:
        """Whether a request goes out as the bytes that came in."""
        return self.retrieve is None and not self.compress


class TokenRange(Spec):
    """Prompt size in tokens, both ends included."""

    min: Annotated[int, Field(ge=0)] = 0
    max: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> "TokenRange":
        if self.max is not None and self.max < self.min:
            raise ValueError("min must not be greater than max")
        return self


class MatchSpec(Spec):
    """All given conditions must hold. `model` and header values are globs (*, ?, [abc]); header names ignore case."""

    model: Text | None = None
    header: dict[Text, Text] = {}
    api_key: Text | None = None
    api_key_sha256: Sha256 | None = None
    prompt_tokens: TokenRange | None = None


class RouteSpec(Spec):
    """Requests that match get this policy, this backend, or both. The first matching route wins."""

    match: MatchSpec = MatchSpec()
    policy: Text | None = None
    backend: Text | None = None

    @model_validator(mode="after")
    def _does_something(self) -> "RouteSpec":
        if self.policy is None and self.backend is None:
            raise ValueError("a route needs a policy, a backend or both")
        return self


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


class SharedCacheSpec(Spec):
    """A Redis or Valkey server for the chunk KV of several gateways: its URL, without a password, which the environment
    variable `password_env` holds.

    Connecting, and each silence, may take `timeout` seconds; what is not used for `ttl` seconds goes.
    """

    url: RedisURL
    password_env: EnvironmentName | None = None
    timeout: Seconds = 0.25
    ttl: Seconds = 86_400.0


class KVCacheSpec(Spec):
    """The chunk store: `device` (a GPU's memory), `ram` and `disk` are its byte budgets, 0 turns a tier off.

    `shared` is behind all of them.
    """

    device: Bytes = 0
    ram: Bytes = 512 * 2**20
    disk: Bytes = 4 * 2**30
    path: Text | None = None
    shared: SharedCacheSpec | None = None


class CollectionsSpec(Spec):
    """Where document collections lie.

    `public`: globs of the names of those whose stored chunk KV all API keys share; each key has its own of the others.
    Without API keys all are public.
    """

    root: Text | None = None
    public: Items[Text] = ()


class ModelsSpec(Spec):
    """Model files: where they are cached, and the embedding model of collections and extractive compression."""

    cache: Text | None = None
    embedder: Text = "all-minilm-l6-v2"


class PolicyFile(Spec):
    """The whole file."""

    version: Annotated[Literal[1], Version]
    default_policy: Text = "lossless"
    server: ServerSpec = ServerSpec()
    backends: Annotated[dict[Text, Annotated[Backend, Field(discriminator="kind")]], Field(min_length=1)] = {
        DEFAULT_BACKEND: EmbeddedBackend(kind="embedded")
    }
    policies: dict[Text, Policy] = {}
    routes: Items[RouteSpec] = ()
    kv_cache: KVCacheSpec = KVCacheSpec()
    collections: CollectionsSpec = CollectionsSpec()
    models: ModelsSpec = ModelsSpec()
