"""What the proxy tells Prometheus: true numbers under documented names, and no secrets."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.stacks.inference_stack import encode, open_inference_stack

from areal_actors.lib.telemetry import logging_to_file
from areal_actors.messages import DescribeEndpoint, OpenSession
from areal_actors.proxy import ProxyConfig, ProxyServer
from areal_actors.testing.engines import EchoEngine

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "why?"}]}


@asynccontextmanager
async def served(engine: EchoEngine | None = None, config: ProxyConfig | None = None):
    """The whole stack, an HTTP client and an open session."""
    engine = engine or EchoEngine(lambda _: encode("one two"))
    async with open_inference_stack(engine=engine, max_seconds=60) as inference:
        proxy = ProxyServer(
            sessions=inference.sessions,
            exports=inference.exports,
            capacity=inference.capacity,
            generation=inference.generation,
            config=config,
        )
        endpoint = await (await inference.system.spawn(proxy)).ask(DescribeEndpoint())
        session = await inference.sessions.ask(OpenSession(task="canary"))
        async with httpx.AsyncClient(base_url=endpoint.url) as http:
            yield inference, http, session


async def scrape(http: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Every sample: its name and the values of its labels, in the order of their names."""
    answer = await http.get("/metrics")
    assert (200, "text/plain; version=0.0.4; charset=utf-8") == (answer.status_code, answer.headers["content-type"])
    families = text_string_to_metric_families(answer.text)
    return {
        (s.name, *(value for _, value in sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


async def test_metrics_count_answers_and_tokens():
    """Answers by status, streams by their first token, tokens by the engine, retries by the sessions."""
    async with served() as (_, http, session):
        headers = {"authorization": f"Bearer {session.api_key}"}
        retry = headers | {"x-stainless-retry-count": "1"}
        await http.post(CHAT, json=BODY, headers=headers | {"x-stainless-retry-count": "0"})
        await http.post(CHAT, json=BODY, headers=retry)
        await http.post(CHAT, json=BODY | {"stream": True}, headers=headers)
        await http.post(CHAT, json=BODY)
        seen = await scrape(http)
    chat = "chat/completions"

    assert (3, 1) == (seen["areal_http_requests_total", chat, "200"], seen["areal_http_requests_total", chat, "401"])
    assert (
        4 == seen["areal_http_request_seconds_count", chat] == seen["areal_http_request_seconds_bucket", "+Inf", chat]
    )
    assert 1 == seen["areal_http_first_token_seconds_count", chat]
    assert 2 * len(encode("one two")) == seen["areal_engine_sampled_tokens_total",]
    assert (1, 1, 0) == (
        seen["areal_retries_recognised_total",],
        seen["areal_sessions_live",],
        seen["areal_interactions_pending",],
    )
    assert {1.0} == {seen["areal_actor_up", actor] for actor in ("sessions", "generation", "capacity", "exports")}


async def test_metrics_show_requests_in_flight_and_disconnects():
    """A request in flight, and then a client that left; both in the figures, each in its place."""
    engine = EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with served(engine) as (_, http, session), anyio.create_task_group() as tasks:
        headers = {"authorization": f"Bearer {session.api_key}"}
        tasks.start_soon(lambda: http.post(CHAT, json=BODY, headers=headers))
        while not engine.requests:
            await anyio.lowlevel.checkpoint()
        during = await scrape(http)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            while not engine.statistics().aborted:
                await anyio.lowlevel.checkpoint()
            after = await scrape(http)

    assert (1, 1) == (during["areal_http_requests_in_flight",], during["areal_interactions_pending",])
    assert (0, 0) == (after["areal_http_requests_in_flight",], after["areal_interactions_pending",])
    assert (1, 1) == (after["areal_http_hang_ups_total", "chat/completions"], after["areal_engine_aborted_total",])


async def test_metrics_count_failed_streams():
    """Its status was 200; that it failed is said elsewhere."""
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with served(engine) as (_, http, session):
        headers = {"authorization": f"Bearer {session.api_key}"}
        engine.release(6)  # a stream begins with its first text, which a parser may hold back for a few tokens
        async with http.stream("POST", CHAT, json=BODY | {"stream": True}, headers=headers) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            engine.fail(RuntimeError("gone"))
            async for _ in lines:
                pass
        seen = await scrape(http)

    assert 1 == seen["areal_http_failed_streams_total", "chat/completions"]


async def test_metrics_leave_out_stopped_actors():
    """An actor that has stopped is down; the others are seen."""
    async with served() as (inference, http, _):
        await inference.generation.stop()
        seen = await scrape(http)

    assert (0, 1) == (seen["areal_actor_up", "generation"], seen["areal_actor_up", "sessions"])
    assert ("areal_engine_version",) not in seen
    assert ("areal_sessions_live",) in seen


async def test_metrics_are_documented_and_have_no_secret():
    """The table has the names that there are; neither the id nor the key of a session appears, wherever it was sent."""
    async with served() as (_, http, session):
        await http.post(f"/{session.session}{CHAT}", json=BODY, headers={"authorization": f"Bearer {session.api_key}"})
        await http.post(f"/{session.session}/{session.api_key}", json=BODY)
        text = (await http.get("/metrics", headers={"accept": "application/openmetrics-text; version=x"})).text
    own, _, _ = DOCUMENT.read_text().partition("### Of a host")
    documented = set(re.findall(r"^\| `(areal_\w+)` \| (\w+)", own, re.MULTILINE))

    assert set(re.findall(r"^# TYPE (areal_\w+) (\w+)", text, re.MULTILINE)) == documented
    assert "canary" not in text
    assert session.api_key not in text


@pytest.mark.parametrize("is_on", [False, True])
async def test_access_log_has_each_request_and_no_secret(tmp_path: Path, *, is_on: bool):
    """One line of JSON with the id that the client got, and the shortened session that its URL or key names."""
    path = tmp_path / "log.jsonl"
    with logging_to_file(path):
        async with served(config=ProxyConfig(access_log=is_on)) as (_, http, session):
            headers = {"authorization": f"Bearer {session.api_key}"}
            answered = await http.post(f"/{session.session}{CHAT}", json=BODY, headers=headers)
            refused = await http.post(CHAT, json=BODY, headers={"authorization": "Bearer sk-wrong"})
            ended = await http.post("/rl/end_session", json={}, headers=headers)
    text = await anyio.Path(path).read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["event"] == "http_request"]

    ids = [answer.headers["x-request-id"] for answer in (answered, refused, ended)]
    named = session.session.partition("-")[0]
    expected = [("chat/completions", 200, True), ("chat/completions", 401, False), ("rl/end_session", 200, True)]
    assert ids * is_on == [line["request"] for line in lines]
    assert expected * is_on == [
        (line["operation"], line["status"], (line["session"] or "").startswith(named)) for line in lines
    ]
    assert not any(secret in text for secret in (session.api_key, session.session, "sk-wrong"))
