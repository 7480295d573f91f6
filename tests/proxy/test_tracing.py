"""Spans of completions: which there are, what they say, whose children they are, and how they leave the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from subprocess import run
from threading import Thread

import anyio
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from tests.proxy.stack import Stack, open_stack, sampled

from areal_actors.lib import tracing
from areal_actors.lib.tracing import open_tracing, tracing_with

TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CLIENT_SPAN}-01"


@contextmanager
def spans() -> Iterator[InMemorySpanExporter]:
    """What is recorded while the block lasts."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with tracing_with(provider):
        yield exporter
    provider.shutdown()


async def ask(stack: Stack, *, expected: int = 200, **more) -> httpx.Response:
    """One chat completion of a client that is traced."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **more}
    headers = {"authorization": f"Bearer {stack.session.api_key}", "traceparent": TRACEPARENT}
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{stack.session.base_url}/chat/completions", json=body, headers=headers)
    assert answer.status_code == expected, answer.text
    return answer


def by_name(found: tuple[ReadableSpan, ...]) -> dict[str, ReadableSpan]:
    """The spans of the completion."""
    return {span.name: span for span in found if span.name in {"POST chat/completions", "completion"}}


@pytest.mark.anyio
@pytest.mark.parametrize("is_stream", [False, True])
async def test_completion_has_a_span_under_that_of_its_request(*, is_stream: bool) -> None:
    """Under the client's trace, with events where the prompt is rendered and the first token arrives."""
    with spans() as exporter:
        async with open_stack(sampled("hello")) as stack:
            await ask(stack, stream=is_stream)
            (interaction,) = await stack.record()
        found = by_name(exporter.get_finished_spans())

    request, completion = found["POST chat/completions"], found["completion"]
    assert request.kind is SpanKind.SERVER
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == CLIENT_SPAN
    assert request.attributes["http.response.status_code"] == 200
    assert completion.parent.span_id == request.context.span_id
    assert [event.name for event in completion.events] == ["rendered", "first token"]
    attributes = completion.attributes
    assert attributes["gen_ai.usage.output_tokens"] == len(interaction.completion.token_ids)
    assert attributes["areal.weights.versions"] == (0,)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["areal.interactions"] == (interaction.id,)
    assert attributes["gen_ai.usage.input_tokens"] == interaction.num_prompt_tokens


@pytest.mark.anyio
async def test_client_that_leaves_ends_its_spans() -> None:
    """The request says so, and the completion that was cut short is an error."""
    with spans() as exporter:
        async with open_stack(sampled("hello"), is_gated=True) as stack:
            with anyio.move_on_after(0.2):
                await ask(stack)
            while len(by_name(exporter.get_finished_spans())) < 2:  # noqa: ASYNC110 - spans tell no one
                await anyio.sleep(0.01)
        found = by_name(exporter.get_finished_spans())
    assert found["POST chat/completions"].attributes["areal.hung_up"] is True
    assert found["completion"].status.status_code is StatusCode.ERROR


@pytest.mark.anyio
async def test_refused_request_is_a_span_with_its_status() -> None:
    """It never reaches the sessions; 4xx is an error of the client, not of the server."""
    with spans() as exporter:
        async with open_stack() as stack:
            await ask(stack, expected=400, temperature="hot")
        found = by_name(exporter.get_finished_spans())
    assert set(found) == {"POST chat/completions"}
    assert found["POST chat/completions"].attributes["http.response.status_code"] == 400
    assert found["POST chat/completions"].status.status_code is StatusCode.UNSET


@pytest.mark.anyio
async def test_no_span_has_a_key_or_a_whole_session() -> None:
    """Both open sessions, and traces are read by others."""
    with spans() as exporter:
        async with open_stack(sampled("hello")) as stack:
            await ask(stack)
            secrets = [stack.session.session_id, stack.session.api_key]
        text = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert [secret for secret in secrets if secret in text] == []


@pytest.mark.anyio
async def test_trace_that_is_not_sampled_costs_the_sessions_nothing() -> None:
    """The decision of the client or of the sampler holds for all parts."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with tracing_with(provider):
        async with open_stack(sampled("hello")) as stack:
            await ask(stack)
    assert exporter.get_finished_spans() == ()


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP/HTTP receiver: its URL, and what it has been sent."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", received
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.anyio
async def test_standard_variables_send_spans_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were recorded have arrived when the block ends."""
    with collector() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        with open_tracing():
            async with open_stack(sampled("hello")) as stack:
                await ask(stack)
        assert tracing.tracer is None
    resources = [resource for message in received for resource in message.resource_spans]
    about = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    assert about["service.name"] == "areal-actors"
    assert about["deployment.environment"] == "test"
    names = {span.name for each in resources for scope in each.scope_spans for span in scope.spans}
    assert names >= {"POST chat/completions", "completion"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_traced_unless_it_is_asked_for(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the SDK decide."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with open_tracing():
        assert tracing.tracer is None


def test_program_without_tracing_imports_none_of_it() -> None:
    """The packages are an extra."""
    code = (
        "import sys; import areal_actors.proxy.app, areal_actors.sessions.manager\n"
        "from areal_actors.lib import tracing\n"
        "with tracing.open_tracing(): print(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
