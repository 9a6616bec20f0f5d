"""What is seen of one request on its way: the fields of its line in the log, and its spans where traces are on.

The edge opens it, and whoever is on the way enters what he knows, from this task, from tasks that it began, and from
worker threads. Where none is open (the decorator, shadows) nothing is entered. Names, counts, times and codes only, no
content.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ..prompt import Report, Usage
from .logs import log_failure
from .tracing import Traces, failed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("promptsluice.requests")

_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})  # asked every few seconds, by machines
_NOTHING: AbstractContextManager[None] = nullcontext()


class Observed:
    """One HTTP exchange. `fields` are those of its line in the log."""

    def __init__(self, request_id: str, *, traces: Traces | None, span: "Span | None") -> None:
        self.fields: dict[str, Any] = {"request_id": request_id}
        self.traces = traces
        self.span = span
        self.operation: Span | None = None
        self.phase: Span | None = None
        self.due: list[Callable[[], None]] | None = []
        """What waits for the answer to be out; None once it is."""


_HERE: ContextVar[Observed | None] = ContextVar("promptsluice_observed", default=None)


class Observing:
    """Open it for the exchange that is served within."""

    def __init__(self, request_id: str, *, method: str, headers: Mapping[str, str], traces: Traces | None) -> None:
        self._request_id, self._traces = request_id, traces
        self._span = _NOTHING if traces is None else traces.request(method, headers)

    def __enter__(self) -> Observed:
        observed = Observed(self._request_id, traces=self._traces, span=self._span.__enter__())
        self._token = _HERE.set(observed)
        return observed

    def __exit__(self, *exc: Any) -> None:
        _HERE.reset(self._token)
        self._span.__exit__(*exc)


@contextmanager
def unobserved() -> Iterator[None]:
    """What is begun within is nobody's."""
    token = _HERE.set(None)
    try:
        yield
    finally:
        _HERE.reset(token)


def step(name: str) -> "AbstractContextManager[Span | None]":
    """A part of the way, which becomes a span."""
    observed = _HERE.get()
    return _NOTHING if observed is None or observed.traces is None else observed.traces.step(name)


def entered(**fields: Any) -> None:
    """Enter fields of the log's line; a later value takes the place of an earlier one."""
    observed = _HERE.get()
    if observed is not None:
        observed.fields.update(fields)


def afterwards(work: Callable[[], None]) -> None:
    """Do this once the answer is out, so that no client waits for our books; at once where no exchange is open."""
    observed = _HERE.get()
    if observed is None or observed.due is None:
        work()
    else:
        observed.due.append(work)


def dispatched(operation: str, provider: str, model: str, *, stream: bool) -> Mapping[str, str]:
    """A model is asked now. Returns the headers that tell its server so."""
    observed = _HERE.get()
    if observed is None or observed.traces is None:
        return {}
    span = observed.traces.began(f"{operation} {model}", parent=observed.span, call=True)
    span.set_attributes(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": provider,
            "gen_ai.request.model": model,
            "gen_ai.request.stream": stream,
        }
    )
    observed.operation = span
    _phase(observed, "dispatch")
    return observed.traces.headers(span)


def replied(*, stream: bool) -> None:
    """Who was asked has begun to answer; a stream's first token may be still to come."""
    observed = _HERE.get()
    if observed is not None:
        _phase(observed, "first token" if stream else None)


def first_token(seconds: float) -> None:
    """`seconds` since the request came."""
    observed = _HERE.get()
    if observed is not None:
        observed.fields["ttft_ms"] = round(seconds * 1000, 1)
        _phase(observed, "stream")


def finished(report: Report, *, model: str, outcome: str, usage: Usage | None) -> None:
    """The answer is over, one way or another."""
    observed = _HERE.get()
    if observed is None:
        return
    counts = {"tokens_in": report.tokens_in, "tokens_out": report.tokens_out, "tokens_reused": report.reused}
    if usage is not None:
        counts |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        counts["cached_tokens"] = usage.cached_tokens
    overhead = round(report.overhead_ms, 2)
    way = {"model": model, "policy": report.policy, "backend": report.backend, "outcome": outcome}
    observed.fields |= {**way, **counts, "overhead_ms": overhead}
    span = observed.operation
    if span is None:
        return
    _phase(observed, None)
    span.set_attributes({"promptsluice.policy": report.policy, "promptsluice.backend": report.backend})
    span.set_attributes({f"promptsluice.{name}": value for name, value in counts.items() if name.startswith("tokens_")})
    if usage is not None:
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
    if outcome != "ok":
        failed(span, observed.fields.get("error") or outcome)
    span.end()
    observed.operation = None


def ended(observed: Observed, *, method: str, route: str, status: int, seconds: float) -> None:
    """The exchange is over: what waited for that, its line, the name of its span. Status 499 is a client that left."""
    due, observed.due = observed.due or (), None
    for work in due:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - one book that fails leaves the others, and the answer is out
            log_failure(error, request_id=observed.fields["request_id"])
    span = observed.span
    if span is not None:
        span.update_name(f"{method} {route}")
        span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            failed(span, str(observed.fields.get("error") or status))
        observed.fields["trace_id"] = f"{span.get_span_context().trace_id:032x}"
    if log.isEnabledFor(logging.INFO) and route not in _QUIET:
        way = {"method": method, "route": route, "status": status, "ms": round(seconds * 1000, 1)}
        fields = {**observed.fields, **way}
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        log.info("%s", told, extra={"fields": fields})


def _phase(observed: Observed, name: str | None) -> None:
    """One phase of an answer ends where the next one begins."""
    if observed.phase is not None:
        observed.phase.end()
        observed.phase = None
    if name is not None and observed.operation is not None and observed.traces is not None:
        observed.phase = observed.traces.began(name, parent=observed.operation)
