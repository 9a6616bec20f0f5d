"""@optimize on every kind of callable: kind, signature and behaviour stay, only `messages` may change."""

import asyncio
import functools
import inspect
import logging
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, get_type_hints

import pytest
from promptsluice import optimize
from promptsluice.gateway.inprocess import Optimizer
from promptsluice.prompt import Report, UnknownPolicy

Messages = list[dict[str, Any]]

LONG: Messages = [{"role": "user", "content": "filler a filler b"}, {"role": "user", "content": "filler stays here"}]
SHORT = [{"role": "user", "content": "a b"}, {"role": "user", "content": "filler stays here"}]


def test_a_plain_function_sees_rewritten_messages(optimizer: Optimizer) -> None:
    @optimize("balanced", config=optimizer)
    def ask(messages: Messages, *, model: str = "m") -> tuple[str, Messages]:
        """Ask."""
        return model, messages

    assert ask(LONG) == ("m", SHORT)
    assert ask(messages=LONG, model="n") == ("n", SHORT)
    assert LONG[0]["content"] == "filler a filler b"


def test_name_docstring_signature_and_hints_stay(optimizer: Optimizer) -> None:
    def ask(model: str, messages: Messages, /, n: int = 1, *, key: str = "") -> str:
        """The docstring."""
        return ""

    decorated = optimize(config=optimizer)(ask)
    assert decorated.__name__ == "ask"
    assert decorated.__doc__ == "The docstring."
    assert inspect.signature(decorated) == inspect.signature(ask)
    assert get_type_hints(decorated) == get_type_hints(ask)
    assert decorated.__module__ == __name__


def test_messages_are_found_at_any_place(optimizer: Optimizer) -> None:
    @optimize(config=optimizer)
    def third(a: int, b: int, messages: Messages, /, *rest: int, **more: int) -> Any:
        return a, b, messages, rest, more

    @optimize(config=optimizer)
    def named(*, messages: Messages) -> Messages:
        return messages

    @optimize(config=optimizer)
    def defaulted(messages: Messages | None = None, *, n: int = 0) -> Any:
        return messages

    assert third(1, 2, LONG, 4, x=5) == (1, 2, SHORT, (4,), {"x": 5})
    assert named(messages=LONG) == SHORT
    assert defaulted() is None
    assert defaulted(n=1) is None
    assert defaulted(LONG) == SHORT


def test_a_call_with_wrong_arguments_fails_as_the_function_itself_would(optimizer: Optimizer) -> None:
    @optimize(config=optimizer)
    def ask(messages: Messages) -> Messages:
        return messages

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'messages'"):
        ask()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        ask(LONG, nothing=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("wrong", [lambda prompt: prompt, lambda *messages: messages, lambda **messages: messages])
def test_a_function_without_messages_is_refused_at_once(optimizer: Optimizer, wrong: Any) -> None:
    with pytest.raises(TypeError, match="needs a parameter called 'messages'"):
        optimize(config=optimizer)(wrong)


def test_without_parentheses() -> None:
    @optimize
    def ask(messages: Messages) -> Messages:
        return messages

    assert ask.__name__ == "ask"
    assert list(inspect.signature(ask).parameters) == ["messages"]


def test_untouched_messages_are_the_same_object(optimizer: Optimizer) -> None:
    @optimize("off", config=optimizer)
    def off(messages: Messages) -> Messages:
        return messages

    @optimize(config=optimizer)
    def balanced(messages: Messages) -> Messages:
        return messages

    assert off(LONG) is LONG
    nothing_to_do = [{"role": "user", "content": "short"}]
    assert balanced(nothing_to_do) is nothing_to_do
    assert balanced(LONG)[1] is LONG[1]


def test_messages_that_can_be_read_once_reach_the_function_whole(optimizer: Optimizer) -> None:
    @optimize("off", config=optimizer)
    def ask(messages: Any) -> Messages:
        return list(messages)

    assert ask(iter(LONG)) == LONG


async def test_a_coroutine_function_stays_one_and_the_loop_goes_on(optimizer: Optimizer) -> None:
    @optimize(config=optimizer)
    async def ask(messages: Messages) -> tuple[Messages, int]:
        return messages, threading.get_ident()

    assert inspect.iscoroutinefunction(ask)
    assert await ask(LONG) == (SHORT, threading.get_ident())


async def test_a_waiting_call_does_not_block_its_loop_and_can_be_cancelled(optimizer: Optimizer, trimming: Any) -> None:
    @optimize("slow", config=optimizer)
    async def ask(messages: Messages) -> None:
        raise AssertionError("never reached")

    task = asyncio.create_task(ask(LONG))
    assert await asyncio.to_thread(trimming.entered.wait, 10), "this loop turns while the pipeline hangs on its own"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(trimming.cancelled.wait, 10)
    assert asyncio.get_running_loop() not in trimming.loops


def test_a_generator_function_stays_one_with_send_and_return(optimizer: Optimizer) -> None:
    @optimize(config=optimizer)
    def stream(messages: Messages) -> Any:
        received = yield messages
        try:
            yield received
        except KeyError:
            yield "caught"
        return "end"

    assert inspect.isgeneratorfunction(stream)
    running = stream(LONG)
    assert next(running) == SHORT
    assert running.send("sent") == "sent"
    assert running.throw(KeyError("x")) == "caught"
    with pytest.raises(StopIteration) as stopped:
        next(running)
    assert stopped.value.value == "end"


def test_a_generator_does_nothing_before_its_first_step(optimizer: Optimizer, trimming: Any) -> None:
    @optimize(config=optimizer)
    def stream(messages: Messages) -> Iterator[Messages]:
        yield messages

    running = stream(LONG)
    assert trimming.policies == []
    assert list(running) == [SHORT]


async def test_an_async_generator_function_stays_one_with_send_throw_and_close(optimizer: Optimizer) -> None:
    closed: list[str] = []

    @optimize(config=optimizer)
    async def stream(messages: Messages) -> Any:
        try:
            received = yield messages
            try:
                yield received
            except KeyError:
                yield "caught"
            yield "more"
        finally:
            closed.append("closed")

    assert inspect.isasyncgenfunction(stream)
    running = stream(LONG)
    assert await anext(running) == SHORT
    assert await running.asend("sent") == "sent"
    assert await running.athrow(KeyError("x")) == "caught"
    await running.aclose()
    assert closed == ["closed"]
    assert [item async for item in stream(LONG)] == [SHORT, None, "more"]


async def test_an_error_in_an_async_generator_comes_out(optimizer: Optimizer) -> None:
    @optimize(config=optimizer)
    async def stream(messages: Messages) -> AsyncIterator[str]:
        yield "one"
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        _ = [item async for item in stream(LONG)]


class Client:
    """Methods of every kind."""

    def __init__(self, optimizer_name: str) -> None:
        self.name = optimizer_name


async def test_methods(optimizer: Optimizer) -> None:
    class Chat(Client):
        @optimize(config=optimizer)
        def ask(self, messages: Messages) -> tuple[str, Messages]:
            return self.name, messages

        @optimize(config=optimizer)
        async def aask(self, *, messages: Messages) -> tuple[str, Messages]:
            return self.name, messages

        @classmethod
        @optimize(config=optimizer)
        def inner(cls, messages: Messages) -> tuple[str, Messages]:
            return cls.__name__, messages

        @optimize(config=optimizer)
        @classmethod
        def outer(cls, messages: Messages) -> tuple[str, Messages]:
            return cls.__name__, messages

        @optimize(config=optimizer)
        @staticmethod
        def static(messages: Messages) -> Messages:
            return messages

    chat = Chat("me")
    assert chat.ask(LONG) == ("me", SHORT)
    assert await chat.aask(messages=LONG) == ("me", SHORT)
    assert chat.inner(LONG) == chat.outer(LONG) == Chat.outer(LONG) == ("Chat", SHORT)
    assert chat.static(LONG) == SHORT


async def test_callable_objects_and_partials(optimizer: Optimizer) -> None:
    class Plain:
        def __call__(self, messages: Messages) -> Messages:
            return messages

    class Async:
        async def __call__(self, messages: Messages) -> Messages:
            return messages

    def base(model: str, messages: Messages) -> tuple[str, Messages]:
        return model, messages

    assert optimize(config=optimizer)(Plain())(LONG) == SHORT
    wrapped = optimize(config=optimizer)(Async())
    assert inspect.iscoroutinefunction(wrapped)
    assert await wrapped(LONG) == SHORT
    assert optimize(config=optimizer)(functools.partial(base, "m"))(LONG) == ("m", SHORT)


def test_a_failing_optimizer_does_not_fail_the_call(optimizer: Optimizer, caplog: pytest.LogCaptureFixture) -> None:
    @optimize("nonsense", config=optimizer)
    def ask(messages: Messages) -> Messages:
        return messages

    with caplog.at_level(logging.WARNING):
        assert ask(LONG) is LONG
    assert "unknown policy 'nonsense'" in caplog.text
    assert "filler" not in caplog.text


@pytest.mark.parametrize("odd", ["text", 7, [1, 2], [], [{"content": "no role"}]])
def test_odd_messages_reach_the_function_as_they_are(optimizer: Optimizer, odd: Any) -> None:
    @optimize(config=optimizer)
    def ask(messages: Any) -> Any:
        return messages

    assert ask(odd) is odd


async def test_strict_raises(optimizer: Optimizer) -> None:
    @optimize("nonsense", config=optimizer, strict=True)
    def ask(messages: Messages) -> Messages:
        return messages

    @optimize("nonsense", config=optimizer, strict=True)
    async def aask(messages: Messages) -> Messages:
        return messages

    with pytest.raises(UnknownPolicy):
        ask(LONG)
    with pytest.raises(UnknownPolicy):
        await aask(LONG)


def test_an_error_of_the_function_is_not_taken_for_ours(optimizer: Optimizer, caplog: pytest.LogCaptureFixture) -> None:
    @optimize(config=optimizer)
    def ask(messages: Messages) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        ask(LONG)
    assert not caplog.records


def test_the_report_says_what_was_done(optimizer: Optimizer) -> None:
    reports: list[Report] = []

    @optimize(config=optimizer, on_report=reports.append)
    def ask(messages: Messages) -> int:
        return len(reports)

    assert ask(LONG) == 1
    assert reports[0].policy == "balanced"
    assert reports[0].tokens_out < reports[0].tokens_in


def test_a_missing_policy_file_is_reported_and_can_be_put_right(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @optimize(None, config=tmp_path / "policies.yaml")
    def ask(messages: Messages) -> Messages:
        return messages

    assert ask(LONG) is LONG
    assert "policies.yaml: the policy file cannot be read" in caplog.text


def test_a_decorated_function_of_a_module_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(of_a_module)) is of_a_module


@optimize
def of_a_module(messages: Messages) -> Messages:
    return messages
