"""OpenTelemetry spans of completions, exported as the standard ``OTEL_*`` variables say.

``open_tracing`` starts the export for a process, if one of the variables asks for it or the embedding program has set a
tracer provider. Without either, ``tracer`` is ``None``, nothing of OpenTelemetry is imported, and a request
pays for one comparison.

A request is traced over two actors, which may be in two processes. The proxy opens the span of the HTTP request, as a
child of the client's ``traceparent``, and sends its ``TraceContext`` with the message; the sessions note times in a
``CompletionTrace``, and record all spans at the end of the request::

    POST chat/completions
    ├── session wait   until the sessions have the request
    ├── render         until its prompt is tokenised; earlier attempts of a retry included
    ├── queue          until its first token: a free slot of an engine, and the prompt
    ├── generate       until its last token, for each choice
    └── capture        until the answer is parsed, in the journal and in the conversation tree
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import time_ns
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from areal_actors.lib.telemetry import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

_log = get_logger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN = "http/protobuf"
_FLUSH_MILLISECONDS = 3000
"""How long the end of a process waits for a collector that does not answer."""
_SERVER_ERROR = 500

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
    if tracer is not None:
        yield
        return
    # The embedding program, or ``opentelemetry-instrument``, has imported this if it has set a provider.
    api: Any = sys.modules.get("opentelemetry.trace")
    provider: Any = None if api is None else api.get_tracer_provider()
    if api is not None and not isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        with tracing_with(provider):
            yield
        return
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    is_disabled = exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    is_requested = not is_disabled and (exporter == "otlp" or any(map(os.environ.get, _ENDPOINTS)))
    created = _create_provider() if is_requested else None
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
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _SPOKEN)
    if protocol != _SPOKEN:
        _log.warning("not_traced", reason=f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; only {_SPOKEN} is supported")
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("not_traced", reason=f"{error.name} is missing; pip install 'areal_actors[otel]'")
        return None
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over what is given here.
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "areal-actors"}
    if "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        named = {}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


# --------------------------------------------------------------------------------------------------- one request


@frozen(kw_only=True)
class TraceContext:
    """The span of a request for another actor: its W3C ``traceparent``, and when the message was sent."""

    traceparent: str
    sent_at: int = field(factory=time_ns)
    """Unix time in nanoseconds."""


class RequestSpan:
    """The span of one HTTP request, from ``start_request`` to ``end``."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def create_context(self) -> TraceContext | None:
        """Return the context for a message that is sent now, or ``None`` if the request is not sampled."""
        context = self._span.get_span_context()
        if not self._span.is_recording():
            return None
        return TraceContext(traceparent=f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}")

    def end(self, status: int | None) -> None:
        """End the span with the status of the answer, or ``None`` if the client has hung up."""
        from opentelemetry.trace import StatusCode

        if status is None:
            self._span.set_attribute("areal.hung_up", True)
        else:
            self._span.set_attribute("http.response.status_code", status)
            if status >= _SERVER_ERROR:
                self._span.set_status(StatusCode.ERROR)
        self._span.end()


def start_request(
    method: str, operation: str, headers: Mapping[bytes, bytes], *, request_id: str
) -> RequestSpan | None:
    """Start the span of an HTTP request, under the client's if ``headers`` name one; ``None`` if nothing is traced."""
    if tracer is None:
        return None
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    names = ("traceparent", "tracestate")
    carrier = {name: headers[name.encode()].decode("latin-1") for name in names if name.encode() in headers}
    return RequestSpan(
        tracer.start_span(
            f"{method} {operation}",
            # Only of the client: a context of the embedding program is not a parent of requests to its server.
            context=TraceContextTextMapPropagator().extract(carrier, context=_create_root()),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": operation, "areal.request": request_id},
        )
    )


def _create_root() -> Any:
    from opentelemetry.context import Context

    return Context()


@frozen(kw_only=True)
class SampledChoice:
    """What the spans of a choice say about it."""

    interaction: str
    num_tokens: int
    num_cached_tokens: int
    versions: tuple[int, ...]
    finish: str
    error: str | None


@define(eq=False)
class CompletionTrace:
    """The times of one completion request. ``record`` makes spans of them, when it is over."""

    context: TraceContext
    handled_at: int = field(factory=time_ns)
    rendered_at: int = 0
    first_at: dict[int, int] = field(factory=dict)
    """When the first token of each choice arrived."""
    last_at: dict[int, int] = field(factory=dict)
    captures: list[tuple[int, int]] = field(factory=list)

    @classmethod
    def begin(cls, context: TraceContext) -> CompletionTrace | None:
        """Return the trace of a request that has just arrived, or ``None`` if this process traces nothing."""
        return None if tracer is None else cls(context)

    def note_rendered(self) -> None:
        """Note that the prompt is tokenised and the request goes to the engine."""
        self.rendered_at = time_ns()

    def note_chunk(self, choice: int) -> None:
        """Note that tokens of ``choice`` have arrived."""
        now = self.last_at[choice] = time_ns()
        self.first_at.setdefault(choice, now)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Note when an answer is parsed and recorded."""
        started = time_ns()
        try:
            yield
        finally:
            self.captures.append((started, time_ns()))

    def record(self, choices: tuple[SampledChoice, ...], *, num_prompt_tokens: int) -> None:
        """Record the spans of the request, which ends now."""
        if tracer is None:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(
            {"traceparent": self.context.traceparent}, context=_create_root()
        )
        now = time_ns()

        def add(name: str, begun: int, ended: int, attributes: Mapping[str, Any], error: str | None = None) -> None:
            from opentelemetry.trace import Status, StatusCode

            assert tracer is not None
            span = tracer.start_span(name, context=parent, start_time=begun, attributes=attributes)
            if error is not None:
                span.set_status(Status(StatusCode.ERROR, error))
            # Clocks of two machines differ; a span never ends before it begins.
            span.end(max(begun, ended))

        prompt = {"gen_ai.usage.input_tokens": num_prompt_tokens}
        add("session wait", self.context.sent_at, self.handled_at, {})
        add("render", self.handled_at, self.rendered_at, prompt)
        for index, choice in enumerate(choices):
            # Without a first token, the request was in the queue until it ended.
            first = self.first_at.get(index, now)
            named = {"areal.interaction": choice.interaction}
            cached = {"areal.cached_tokens": choice.num_cached_tokens}
            is_unanswered = index not in self.first_at
            add("queue", self.rendered_at, first, named | cached, choice.error if is_unanswered else None)
            if not is_unanswered:
                sampled: dict[str, Any] = {
                    "gen_ai.usage.output_tokens": choice.num_tokens,
                    "gen_ai.response.finish_reasons": (choice.finish,),
                    "areal.weights.versions": choice.versions,
                }
                add("generate", first, self.last_at[index], named | sampled, choice.error)
        for begun, ended in self.captures:
            add("capture", begun, ended, {})
