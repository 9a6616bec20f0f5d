"""The sections `kv_cache`, `collections` and `models`: what is kept, and where."""

from typing import Literal

from ..fields import EnvironmentName, Items, RedisURL, Seconds, Text
from ..sizes import Bytes
from .base import Spec


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

    `shared` is behind all of them. `chunk_dtype` is how chunks are kept: as the model computes them, in 8 bits, or
    (`auto`) the one on a CPU and int8 on a GPU.
    """

    device: Bytes = 0
    ram: Bytes = 512 * 2**20
    disk: Bytes = 4 * 2**30
    path: Text | None = None
    shared: SharedCacheSpec | None = None
    chunk_dtype: Literal["auto", "model", "int8", "fp8"] = "auto"


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
