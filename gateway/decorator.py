"""`@optimize`: the gateway's pipeline around any function that takes `messages`, in this process and without a server.

Sync, async, generator and async-generator functions and methods keep their kind, signature, type hints and docstring.
What only a server can do (KV reuse, prefix caching) is left to it: here the prompt is rewritten, nothing is generated.
"""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, ParamSpec, TypeVar, overload

from .inprocess import Config, optimizer_for
from .rewriter import OnReport, Rewriter

P = ParamSpec("P")
R = TypeVar("R")


@overload
def optimize(policy: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def optimize(
    policy: str | None = "balanced",
    *,
    config: Config = None,
    on_report: OnReport | None = None,
    strict: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def optimize(
    policy: Any = "balanced",
    *,
    config: Config = None,
    on_report: OnReport | None = None,
    strict: bool = False,
) -> Any:
    """Rewrite the `messages` argument by a policy before the function sees it. Usable with and without parentheses.

    `policy` is a preset or a policy of `config`; None takes the config's default policy. `config` is the path of a
    policy file, a loaded PolicySet, or an Optimizer that you own and close yourself; functions with the same config
    share one.
    `on_report` is called with the Report of each call, before the function runs. Messages that nothing was done to are
    passed on as the same object. An async function's loop is never blocked; a generator's messages are rewritten at
    its first step.

    A failure of the optimizer is logged and the call goes on with its messages as they are; `strict=True` raises it.
    Raises TypeError at decoration when the function has no parameter called `messages`.
    """
    function, policy = (policy, "balanced") if callable(policy) else (None, policy)
    rewriter = Rewriter(optimizer_for(config), policy=policy, on_report=on_report, strict=strict)
    return functools.partial(_decorated, rewriter=rewriter) if function is None else _decorated(function, rewriter)


class _Place:
    """Where `messages` stands among a function's arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        found = parameters.get("messages")
        if found is None or found.kind in (found.VAR_POSITIONAL, found.VAR_KEYWORD):
            name = getattr(function, "__qualname__", type(function).__name__)  # a repr may quote prompts
            raise TypeError(f"@optimize needs a parameter called 'messages'; {name}({', '.join(parameters)}) has none")
        self.index = -1 if found.kind is found.KEYWORD_ONLY else list(parameters).index("messages")
        self.by_name = found.kind is not found.POSITIONAL_ONLY

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument, or None when the caller left it out (the function's own default or TypeError follows)."""
        if self.by_name and "messages" in kwargs:
            return kwargs["messages"]
        return args[self.index] if 0 <= self.index < len(args) else None

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.by_name and "messages" in kwargs:
            return args, {**kwargs, "messages": value}
        return (*args[: self.index], value, *args[self.index + 1 :]), kwargs


class _Around:
    """Replaces the argument in a call's arguments; a call without messages passes through."""

    def __init__(self, function: Callable[..., Any], rewriter: Rewriter) -> None:
        self._place = _Place(function)
        self._rewriter = rewriter

    def now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        messages = self._place.get(args, kwargs)
        return (args, kwargs) if messages is None else self._place.put(args, kwargs, self._rewriter.now(messages))

    async def soon(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        messages = self._place.get(args, kwargs)
        if messages is None:
            return args, kwargs
        return self._place.put(args, kwargs, await self._rewriter.soon(messages))


def _decorated(function: Any, rewriter: Rewriter) -> Any:
    if isinstance(function, (staticmethod, classmethod)):  # decorated below us: rewrap, so that the descriptor stays
        return type(function)(_decorated(function.__func__, rewriter))
    around = _Around(function, rewriter)
    return functools.wraps(function)(_form_of(function)(function, around))


def _form_of(function: Callable[..., Any]) -> Callable[[Callable[..., Any], _Around], Callable[..., Any]]:
    for is_kind, form in (
        (inspect.isasyncgenfunction, _async_generator),
        (inspect.iscoroutinefunction, _coroutine),
        (inspect.isgeneratorfunction, _generator),
    ):
        if is_kind(function) or is_kind(getattr(function, "__call__", None)):  # noqa: B004 - the kind of a callable object
            return form
    return _plain


def _plain(function: Callable[..., Any], around: _Around) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = around.now(args, kwargs)
        return function(*args, **kwargs)

    return call


def _coroutine(function: Callable[..., Any], around: _Around) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = await around.soon(args, kwargs)
        return await function(*args, **kwargs)

    return call


def _generator(function: Callable[..., Any], around: _Around) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        args, kwargs = around.now(args, kwargs)
        return (yield from function(*args, **kwargs))

    return call


def _async_generator(function: Callable[..., Any], around: _Around) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        args, kwargs = await around.soon(args, kwargs)
        inner = function(*args, **kwargs)
        # Async generators have no `yield from`: values, sent values and thrown errors are handed through by hand.
        try:
            value = await anext(inner)
            while True:
                try:
                    sent = yield value
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown by the caller into the inner generator
                    value = await inner.athrow(error)
                else:
                    value = await inner.asend(sent)
        except StopAsyncIteration:
            return
        finally:
            await inner.aclose()

    return call
