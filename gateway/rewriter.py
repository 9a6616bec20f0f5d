"""One policy applied to `messages` for a function or a client: fails open, reports what was done, sends nothing."""

import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from ..prompt import Prompt, PromptsluiceError, Report

logger = logging.getLogger(__name__)

_FAILED = ("failed", "passed over")  # how the notes begin of steps that the pipeline went on without

OnReport = Callable[[Report], object]

last_report: ContextVar[Report | None] = ContextVar("promptsluice_last_report", default=None)
"""The report of the last call in this thread or task; None before the first one and after a failure."""


class Prepares(Protocol):
    """The pipeline as a Rewriter sees it. Raises our errors; never changes what it is given."""

    def prepare(self, messages: Any, *, policy: str | None) -> tuple[Prompt, Report]:
        """Block until the messages have passed the pipeline."""
        ...

    async def aprepare(self, messages: Any, *, policy: str | None) -> tuple[Prompt, Report]:
        """The same, awaited from any event loop without blocking it."""
        ...


class Rewriter:
    """Rewrites messages by a policy (None: the configuration's default one).

    Messages that nothing was done to come back as the very object that came in. A failure is logged and gives the
    messages back as they are, unless `strict`. `on_report` gets the Report before the messages are returned.
    """

    def __init__(self, optimizer: Prepares, *, policy: str | None, on_report: OnReport | None, strict: bool) -> None:
        self._optimizer = optimizer
        self._policy = policy
        self._on_report = on_report
        self._strict = strict

    def now(self, messages: Any) -> Any:
        """Rewrite and block until it is done."""
        messages = _readable_twice(messages)
        try:
            return self._done(messages, *self._optimizer.prepare(messages, policy=self._policy))
        except Exception as error:  # noqa: BLE001 - the user's call must not fail because of us
            return self._failed(messages, error)

    async def soon(self, messages: Any) -> Any:
        """Rewrite while the caller's event loop goes on running."""
        messages = _readable_twice(messages)
        try:
            return self._done(messages, *await self._optimizer.aprepare(messages, policy=self._policy))
        except Exception as error:  # noqa: BLE001 - the user's call must not fail because of us
            return self._failed(messages, error)

    def _done(self, messages: Any, prompt: Prompt, report: Report) -> Any:
        # The pipeline itself goes on without a step that fails, and notes it.
        failed = [f"{step.name}: {step.note}" for step in report.steps if step.note.startswith(_FAILED)]
        if failed and self._strict:
            raise PromptsluiceError(f"the policy {report.policy} was not carried out: {'; '.join(failed)}")
        last_report.set(report)
        if self._on_report is not None:
            self._on_report(report)
        return prompt.messages if prompt.changed else messages

    def _failed(self, messages: Any, error: Exception) -> Any:
        last_report.set(None)
        if self._strict:
            raise error
        logger.warning("prompt sent as it is, not optimized: %s: %s", type(error).__name__, error)
        return messages


def _readable_twice(messages: Any) -> Any:
    """A one-time iterator becomes a list, anything else stays the object that it is."""
    return list(messages) if isinstance(messages, Iterator) else messages
