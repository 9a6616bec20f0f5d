"""The whole policy file, version 1."""

from typing import Annotated, Literal

from pydantic import Field

from ..fields import Items, Text, Version
from .backends import DEFAULT_BACKEND, Backend, EmbeddedBackend
from .base import Spec
from .policy import Policy
from .routes import RouteSpec
from .server import ServerSpec
from .stores import CollectionsSpec, KVCacheSpec, ModelsSpec


class PolicyFile(Spec):
    """The whole file."""

    version: Annotated[Literal[1], Version]
    default_policy: Text = "lossless"
    server: ServerSpec = ServerSpec()
    backends: dict[Text, Annotated[Backend, Field(discriminator="kind")]] = Field(
        default_factory=lambda: {DEFAULT_BACKEND: EmbeddedBackend(kind="embedded")}, min_length=1
    )
    policies: dict[Text, Policy] = Field(default_factory=dict)
    routes: Items[RouteSpec] = ()
    kv_cache: KVCacheSpec = KVCacheSpec()
    collections: CollectionsSpec = CollectionsSpec()
    models: ModelsSpec = ModelsSpec()
