"""OpenTelemetry traces: how spans are made and where they go. The one file that knows OpenTelemetry.

On where the standard variables ask for it (`OTEL_TRACES_EXPORTER`, or an OTLP endpoint) and the extra is installed
(`pip install promptsluice[otel]`); sampling, batches, resource and exporter are configured by their `OTEL_*` variables.
Names are those of the conventions for HTTP and generative AI. No prompt, answer or error message is in an attribute.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..prompt import ConfigError, PromptsluiceError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_HTTP = "http/protobuf"


class Traces:
    """Makes spans with a tracer provider, which belongs to whoever made it."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import propagate

        self._tracer: Tracer = provider.get_tracer("promptsluice")
        self._propagate = propagate

    @contextmanager
    def request(self, method: str, headers: Mapping[str, str]) -> "Iterator[Span]":
        """The span of one HTTP exchange, a child of the client's by its `traceparent`. It is ended with this."""
        from opentelemetry.trace import SpanKind

        parent = self._propagate.extract(headers)
        attributes = {"http.request.method": method}
        with self._tracer.start_as_current_span(
            method, context=parent, kind=SpanKind.SERVER, attributes=attributes, record_exception=False,
            set_status_on_exception=False,
        ) as span:  # fmt: skip
            yield span

    @contextmanager
    def step(self, name: str) -> "Iterator[Span]":
        """A part of what is going on here, in this thread or task."""
        with self._tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as span:
            try:
                yield span
            except Exception as error:
                failed(span, error.code or error.type if isinstance(error, PromptsluiceError) else type(error).__name__)
                raise

    def began(self, name: str, *, parent: "Span | None" = None, call: bool = False, **attributes: Any) -> "Span":
        """A span that its taker ends; without a parent it is a child of what is going on here. `call`: of a server."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        return self._tracer.start_span(
            name,
            context=None if parent is None else set_span_in_context(parent),
            kind=SpanKind.CLIENT if call else SpanKind.INTERNAL,
            attributes=attributes,
        )

    def headers(self, span: "Span") -> dict[str, str]:
        """What tells a server of its caller's span: `traceparent`, and `tracestate` where there is one."""
        from opentelemetry.trace import set_span_in_context

        carrier = dict[str, str]()
        self._propagate.inject(carrier, context=set_span_in_context(span))
        return carrier


def failed(span: "Span", kind: str) -> None:
    """Mark a span by the kind of its error, whose message might quote a prompt."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the standard variables turn traces on."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter != "none" if exporter else any(environment.get(name) for name in _ENDPOINTS)


@contextmanager
def traced(environment: Mapping[str, str] = os.environ) -> Iterator[Traces | None]:
    """Traces by the standard variables, None where they ask for none; what is left is exported at the end.

    ConfigError where they ask for what is not there.
    """
    if not wanted(environment):
        yield None
        return
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("OTEL_* variables ask for traces: pip install promptsluice[otel]") from error
    exporter = _exporter(environment)
    provider = TracerProvider(resource=_resource(environment))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield Traces(provider)
    finally:
        provider.shutdown()


def _resource(environment: Mapping[str, str]) -> Any:
    """As the variables say; the service has our name unless they name it."""
    from opentelemetry.sdk.resources import Resource

    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if named else {"service.name": "promptsluice"})


def _exporter(environment: Mapping[str, str]) -> Any:
    name = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    if name != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {name[:40]!r}; known here: otlp, console, none")
    general = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", _HTTP)
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", general)
    if protocol != _HTTP:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol[:40]!r}; known here: {_HTTP}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError("traces go out by OTLP: pip install promptsluice[otel]") from error
    return OTLPSpanExporter()
