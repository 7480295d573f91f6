"""OpenTelemetry spans of completions, exported as the standard ``OTEL_*`` variables say.

``open_tracing`` starts the export for a process, if one of the variables asks for it or the embedding program has set a
tracer provider. Without either, ``tracer`` is ``None`` and nothing of OpenTelemetry is imported.

The proxy opens the span of an HTTP request, as a child of the client's ``traceparent``, and sends its own with the
message to the sessions. These open the span of the completion, also in another process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from areal_actors.lib.telemetry import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

_log = get_logger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_MILLISECONDS = 3000
"""How long the end of a process waits for a collector that does not answer."""

tracer: Tracer | None = None
"""That of this process, ``None`` if nothing is traced. Read it from the module, as it changes."""


@contextmanager
def open_tracing() -> Iterator[None]:
    """Trace completions of this process while the block lasts, if its environment asks for it.

    A tracer provider that the embedding program has set is used, and left as it is. Otherwise spans are sent by
    OTLP/HTTP if ``OTEL_EXPORTER_OTLP_ENDPOINT``, its variant for traces or ``OTEL_TRACES_EXPORTER=otlp`` is set, unless
    ``OTEL_SDK_DISABLED`` or ``OTEL_TRACES_EXPORTER=none`` forbids it. Without the packages, a warning says what to
    install. A collector that cannot be reached loses spans, and delays the end of the block by seconds at most.
    """
    # The embedding program, or ``opentelemetry-instrument``, has imported this if it has set a provider.
    api = sys.modules.get("opentelemetry.trace")
    provider: Any = None if api is None else api.get_tracer_provider()
    if api is not None and not isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        with tracing_with(provider):
            yield
        return
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    is_disabled = exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_requested = not is_disabled and (exporter == "otlp" or any(map(os.environ.get, _ENDPOINTS)))
    created = _create_provider() if tracer is None and is_requested else None
    if created is None:
        yield
        return
    try:
        with tracing_with(created):
            yield
    finally:
        created.force_flush(_FLUSH_MILLISECONDS)
        created.shutdown()


@contextmanager
def tracing_with(provider: TracerProvider) -> Iterator[None]:
    """Trace completions of this process with ``provider`` while the block lasts."""
    global tracer  # noqa: PLW0603 - one for the process, as a logger is
    from areal_actors import __version__

    previous, tracer = tracer, provider.get_tracer("areal_actors", __version__)
    try:
        yield
    finally:
        tracer = previous


def _create_provider() -> SdkTracerProvider | None:
    """Return a provider that exports by OTLP/HTTP; its other settings are read from variables by the SDK."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("not_traced", reason=f"{error.name} is missing; pip install 'areal_actors[otel]'")
        return None
    # The name that OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES gives wins.
    named = Resource({SERVICE_NAME: "areal-actors"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def start_span(
    name: str, carrier: Mapping[str, str], attributes: Mapping[str, str] | None = None, *, is_server: bool = False
) -> Span | None:
    """Start a span under the one that the headers in ``carrier`` name; ``None`` if nothing is traced.

    The caller ends it. One that is not ended is not exported.
    """
    if tracer is None:
        return None
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    # A context of the embedding program is not a parent of requests to its server.
    parent = TraceContextTextMapPropagator().extract(carrier, context=Context())
    kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
    return tracer.start_span(name, context=parent, kind=kind, attributes=attributes)


def traceparent_of(span: Span) -> str:
    """Return the W3C header that names ``span`` as a parent."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def set_error(span: Span, description: str | None = None) -> None:
    """Mark what ``span`` covers as failed."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, description))
