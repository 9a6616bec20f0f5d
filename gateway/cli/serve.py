"""`promptsluice serve`: fetches what the policy file needs, then hands over to the server."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import err

if TYPE_CHECKING:
    from ...backend_engine.hub import ModelHub
    from ...policies import PolicySet

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Policy file (YAML). Without one: the default model, policy lossless."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never fetch a model; fail if one is missing.")]


def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; overrides the file's.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; overrides the file's.")] = None,
    offline: Offline = False,
) -> None:
    """Start the gateway."""
    set_environment()
    from ...policies import PolicySet

    policies = PolicySet.load(config)
    fetch_models(policies, offline=offline)
    from ..server import serve as run

    run(policies, host=host or policies.server.host, port=policies.server.port if port is None else port)


def set_environment() -> None:
    """Before torch is imported; what the user has set stays.

    Threads that spin while they wait cost a shared CPU 3 to 4 times the latency. Bars of libraries would break ours.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def chat_models(policies: "PolicySet") -> tuple[str, ...]:
    """The models without which the backends cannot answer or count: of embedded ones, and tokenizers for upstreams."""
    from ...policies import EmbeddedBackend

    backends = policies.backends.values()
    named = [spec.model if isinstance(spec, EmbeddedBackend) else spec.tokenizer for spec in backends]
    return tuple(dict.fromkeys(name for name in named if name))


def hub_of(policies: "PolicySet") -> "ModelHub":
    """The model cache of a policy set."""
    from ...backend_engine.hub import ModelHub, default_root

    return ModelHub(policies.models_cache or default_root())


def fetch_models(policies: "PolicySet", *, offline: bool) -> None:
    """Make sure that the models are in the cache. ModelUnavailable when a chat model is missing and cannot be had.

    Without the embedder requests are still answered: a warning says what is left out.
    """
    from ...prompt import ModelUnavailable

    hub = hub_of(policies)
    for name in chat_models(policies):
        fetch(hub, name, offline=offline)
    try:
        fetch(hub, policies.models.embedder, offline=offline)
    except ModelUnavailable as error:
        typer.echo(f"warning: no retrieval and no pruning by meaning: {error}", err=True)


def fetch(hub: "ModelHub", name: str, *, offline: bool) -> None:
    """Get one model if it is not there."""
    from ...backend_engine.hub import RichProgress
    from ...prompt import ModelUnavailable

    try:
        hub.resolve(name)
    except ModelUnavailable:
        if offline:
            raise
        err().print(f"fetching the model {name}, once")
        with RichProgress() as progress:
            hub.pull(name, progress=progress)
