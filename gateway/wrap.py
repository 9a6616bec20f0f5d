"""`wrap(client)`: an OpenAI client whose chat completions pass the pipeline first; everything else is untouched.

The result is an instance of the client's own class that shares its connections, so isinstance checks, options, raw
and streaming responses keep working. `chat.completions.create`, `.parse` and `.stream` are rewritten, sync and async;
Responses, embeddings and the rest go out as they are.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Self, TypeVar

from ..prompt import Report
from .inprocess import Config, optimizer_for
from .rewriter import OnReport, Rewriter, last_report

Client = TypeVar("Client")


def wrap(
    client: Client,
    *,
    policy: str | None = "balanced",
    config: Config = None,
    on_report: OnReport | None = None,
    strict: bool = False,
) -> Client:
    """Return a client like `client` whose chat messages are rewritten by a policy before they are sent.

    `policy`, `config`, `on_report` and `strict` are those of `@optimize`. The original client stays as it is; both
    share their connection pool, so closing one closes the other. `promptsluice_report` on the result is the Report of
    the last call in this thread or task. Copies made with `copy` and `with_options` stay wrapped; wrapping twice
    replaces the first policy.
    Raises TypeError for anything but an OpenAI or AsyncOpenAI client (or a subclass of these).
    """
    # Whoever has a client has imported its package: looking it up there spares us a dependency.
    openai = sys.modules.get("openai")
    if openai is None or not isinstance(client, (openai.OpenAI, openai.AsyncOpenAI)):
        raise TypeError(f"wrap needs an OpenAI or AsyncOpenAI client, not {type(client).__name__}")
    wrapped: Any = object.__new__(_client_class(type(client)))
    wrapped.__dict__.update({name: value for name, value in vars(client).items() if name not in _DERIVED})
    wrapped._promptsluice = Rewriter(optimizer_for(config), policy=policy, on_report=on_report, strict=strict)
    return wrapped


# Cached properties of a client that lead to its chat completions; a copy must make its own.
_DERIVED = ("chat", "beta", "with_raw_response", "with_streaming_response")


class _Wrapped:
    """What a wrapped client has before its own class."""

    _promptsluice: Rewriter

    @property
    def promptsluice_report(self) -> Report | None:
        """What was done by the last call in this thread or task."""
        return last_report.get()

    @functools.cached_property
    def chat(self) -> Any:
        plain = _cached_property_of(self, "chat")
        completions = plain.completions
        plain.__dict__["completions"] = _completions_class(type(completions))(self)
        return plain

    @functools.cached_property
    def beta(self) -> Any:
        plain = _cached_property_of(self, "beta")
        plain.__dict__["chat"] = self.chat
        return plain

    def copy(self, **options: Any) -> Self:
        fresh = super().copy(**options)  # type: ignore[misc]
        fresh._promptsluice = self._promptsluice
        return fresh

    with_options = copy


def _cached_property_of(client: Any, name: str) -> Any:
    """What the client's own class would have put there, made without storing it."""
    for base in type(client).__mro__[type(client).__mro__.index(_Wrapped) + 1 :]:
        if name in base.__dict__:
            return base.__dict__[name].func(client)
    raise AttributeError(f"{type(client).__name__} has no {name}")


@functools.cache
def _client_class(base: type) -> type:
    if issubclass(base, _Wrapped):
        return base
    return type(base.__name__, (_Wrapped, base), {"__module__": base.__module__, "__doc__": base.__doc__})


@functools.cache
def _completions_class(base: type) -> type:
    """A subclass whose `create` and `parse` rewrite first. `stream` goes through `create` in the SDK."""
    around = _around_async if base.__name__.startswith("Async") else _around
    methods = {name: around(getattr(base, name)) for name in ("create", "parse") if hasattr(base, name)}
    return type(base.__name__, (base,), {"__module__": base.__module__, "__doc__": base.__doc__, **methods})


def _around(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "messages" in kwargs:
            kwargs["messages"] = self._client._promptsluice.now(kwargs["messages"])
        return method(self, *args, **kwargs)

    return call


def _around_async(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "messages" in kwargs:
            kwargs["messages"] = await self._client._promptsluice.soon(kwargs["messages"])
        return await method(self, *args, **kwargs)

    return call
