"""The proxy under attack: it answers every request without failing, and no client reads another client's session.

One real proxy per event loop, on a socket, in a thread, in front of the real session manager; its engine repeats the
prompt, so that what a session was told would be heard in its answers. The profile ``fuzz`` (``nox -s fuzz_http``) looks
longer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import httpx
import orjson
import pytest
from anyio.from_thread import start_blocking_portal
from attrs import define, frozen
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.stacks.inference_stack import InferenceStack, open_inference_stack

from areal_actors.cache import SessionSettings
from areal_actors.messages import CollectSession, DescribeEndpoint, Endpoint
from areal_actors.proxy import ProxyConfig, ProxyServer
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.sessions.manager import SessionsConfig
from areal_actors.testing.engines import EchoEngine

CHAT = "/v1/chat/completions"
IDEMPOTENCY_KEY = "the-victims-own-name-for-it"
LONG = 1000
"""Profiles with so many examples are not part of the ordinary suite."""
QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))


@frozen(kw_only=True)
class Tenant:
    """A session with something to hide: in its task, its messages, its answers and its tokens."""

    session: str
    key: str
    secret: str
    interaction: str

    @property
    def hidden(self) -> tuple[str, ...]:
        """Texts that no other client may read, in parts of a URL or of a message either."""
        return (self.secret, self.key)


@define
class Served:
    """A proxy in a thread, and two sessions in it."""

    url: str
    admin: dict[str, str]
    http: httpx.Client
    portal: Any
    inference: InferenceStack
    tenants: list[Tenant]

    def open(self) -> Tenant:
        """A session that has said one thing, under an idempotency key."""
        secret = f"canary{secrets.token_hex(8)}"
        opened = self.http.post("/rl/start_session", json={"task_id": "tenant"}, headers=self.admin).json()
        headers = {"authorization": f"Bearer {opened['api_key']}", "idempotency-key": IDEMPOTENCY_KEY}
        body = {"messages": [{"role": "user", "content": secret}]}
        answer = self.http.post(CHAT, json=body, headers=headers)
        assert secret in answer.text
        return Tenant(
            session=opened["session_id"], key=opened["api_key"], secret=secret, interaction=answer.json()["id"]
        )

    def record(self, tenant: Tenant):
        """The session as its owner would export it."""
        return self.portal.call(self.inference.sessions.ask, CollectSession(session=tenant.session))


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def backend(request) -> str:
    return request.param


def serve(backend: str, **config: Any) -> Iterator[Served]:
    """Serve in a thread until the generator is closed."""
    ready: list[tuple[InferenceStack, Endpoint, anyio.Event]] = []

    async def run(*, task_status: anyio.abc.TaskStatus) -> None:
        limits = CapacityLimits(max_concurrent=100_000, batch_size=100_000)
        lifetimes = SessionsConfig(lifetimes=SessionSettings(grace_seconds=3600))
        engine = EchoEngine(context_length=4096)
        async with open_inference_stack(
            engine=engine, limits=limits, sessions=lifetimes, max_seconds=36_000
        ) as inference:
            proxy = ProxyServer(
                sessions=inference.sessions,
                exports=inference.exports,
                capacity=inference.capacity,
                generation=inference.generation,
                config=ProxyConfig(**config),
            )
            endpoint = await (await inference.system.spawn(proxy)).ask(DescribeEndpoint())
            done = anyio.Event()
            ready.append((inference, endpoint, done))
            task_status.started()
            await done.wait()

    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal(backend))
        future, _ = portal.start_task(run)
        inference, endpoint, done = ready[0]
        stack.callback(future.result)
        stack.callback(portal.call, done.set)
        http = stack.enter_context(httpx.Client(base_url=endpoint.url, timeout=30))
        admin = {"authorization": f"Bearer {endpoint.admin_key}"}
        served = Served(endpoint.url, admin, http, portal, inference, [])
        served.tenants = [served.open() for _ in range(2)]
        yield served


@pytest.fixture(scope="module")
def closed(backend: str) -> Iterator[Served]:
    """Sessions are opened by their keys alone: their ids are not a secret."""
    yield from serve(backend, session_urls=False)


@pytest.fixture(scope="module")
def served(backend: str) -> Iterator[Served]:
    """The default: the URL of a session opens it."""
    yield from serve(backend)


# ------------------------------------------------------------------------------------------- attacks on a session

OPERATIONS = (
    "chat/completions",
    "completions",
    "responses",
    "messages",
    "messages/count_tokens",
    "rl/set_reward",
    "rl/end_session",
    "rl/finalize",
    "rl/start_session",
    "export_trajectories",
    "grant_capacity",
    "models",
    "health",
    "metrics",
    "openapi.json",
)
SPECIAL = ("..", ".", "%2e%2e", "%00", "*", "null", "undefined", "v1", "", " ", "%2f", "?", "é", "rl")


@frozen(kw_only=True)
class Attack:
    """A request with holes, which ``fill`` fills with what an attacker knows."""

    method: str
    path: tuple[str, ...]
    query: dict[str, str]
    headers: dict[str, str]
    body: Any

    def fill(self, known: dict[str, str]) -> dict[str, Any]:
        """The arguments of a request."""
        path = "/".join(known.get(part, part) for part in self.path)
        body = orjson.dumps(self.body).decode()
        for hole, value in known.items():
            body = body.replace(hole, value)
        return {
            "method": self.method,
            "url": f"/{path}",
            "params": {name: known.get(value, value) for name, value in self.query.items()},
            "headers": {name: _header(value, known) for name, value in self.headers.items()},
            "content": body,
        }


def _header(value: str, known: dict[str, str]) -> bytes:
    for hole, real in known.items():
        value = value.replace(hole, real)
    return value.encode("latin-1", "replace")


HOLES = ("$own_session", "$own_key", "$own_interaction", "$session", "$interaction")
words = st.sampled_from((*HOLES, *SPECIAL)) | st.text(max_size=8)
keys = st.sampled_from(("$own_key", "$session", "$interaction", "sk-$session", "sk-admin-", "", "$own_key $session"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70).filter(lambda i: abs(i) < 2**63) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
chats = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": words}), min_size=1, max_size=2)},
    optional={"stream": st.booleans(), "n": st.integers(1, 2), "session_id": words, "previous_response_id": words},
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "session_id": words,
        "interaction_id": words,
        "completion_id": words,
        "reward": st.floats(0, 1) | words,
        "final_reward": st.floats(0, 1) | words,
        "style": words,
        "discount": words,
    },
)
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=12)
attacks = st.builds(
    Attack,
    method=st.sampled_from(("POST", "POST", "GET", "PUT", "DELETE", "OPTIONS")),
    path=st.tuples(st.lists(words, max_size=3), st.sampled_from(OPERATIONS)).map(lambda p: (*p[0], *p[1].split("/"))),
    query=st.dictionaries(st.sampled_from(("session_id", "interaction_id", "key", "style")), words, max_size=2),
    headers=st.fixed_dictionaries(
        {},
        optional={
            "authorization": keys.map("Bearer {}".format) | keys | header_values,
            "x-api-key": keys | header_values,
            "idempotency-key": st.just(IDEMPOTENCY_KEY) | keys,
            "x-stainless-retry-count": st.sampled_from(("0", "1", "2", "-1", "x", "9" * 30)),
            "x-areal-agent": words.filter(lambda w: w.isascii() and w.isprintable()),
            "accept": header_values,
            "content-type": header_values,
        },
    ),
    body=chats | arguments | json_values,
)
REPEATED = Attack(
    method="POST",
    path=("v1", "chat", "completions"),
    query={},
    headers={"authorization": "Bearer $own_key", "idempotency-key": IDEMPOTENCY_KEY},
    body={"messages": [{"role": "user", "content": "$interaction"}]},
)
NAMED = Attack(
    method="POST",
    path=("$session", "v1", "chat", "completions"),
    query={"session_id": "$session"},
    headers={"x-api-key": "$own_key"},
    body={"messages": [{"role": "user", "content": "hm"}]},
)


def assault(served: Served, attack: Attack, *, knows_session: bool) -> None:
    """Attack the second session with the key of a third; nothing of it may be heard, nothing may fail or change."""
    victim, own = served.tenants[1], served.tenants[0]
    before = served.record(victim)
    if served.record(own).is_ended:
        served.tenants[0] = own = served.open()
    known = {
        "$own_session": own.session,
        "$own_key": own.key,
        "$own_interaction": own.interaction,
        "$session": victim.session if knows_session else victim.session[:-1],
        "$interaction": victim.interaction,
    }
    try:
        answer = served.http.request(**attack.fill(known))
    except (httpx.InvalidURL, httpx.LocalProtocolError):
        return
    heard = f"{answer.headers}{answer.text}"

    assert answer.status_code < 500, (attack, answer.status_code, answer.text)
    assert not any(hidden in heard for hidden in victim.hidden), (attack, heard)
    assert before == served.record(victim), attack


@QUIET
@given(attack=attacks)
@example(REPEATED)
@example(NAMED)
def test_session_ids_open_nothing_without_keys(closed: Served, attack: Attack):
    """Where keys alone open sessions, a client that knows every id of a session can neither read nor change it."""
    assault(closed, attack, knows_session=True)


@QUIET
@given(attack=attacks)
@example(REPEATED)
def test_variants_of_a_session_name_open_nothing(served: Served, attack: Attack):
    """Where URLs open sessions, an id that lacks one character does not, whatever comes with it."""
    assault(served, attack, knows_session=False)


def test_attacks_succeed_with_the_key(served: Served):
    """The harness itself: who has the id of the session hears its secret, so that a leak would be noticed."""
    victim = served.open()
    body = {"messages": [{"role": "user", "content": victim.secret}]}
    answer = served.http.post(f"/{victim.session}{CHAT}", json=body, headers={"idempotency-key": IDEMPOTENCY_KEY})

    assert victim.interaction == answer.json()["id"]
    assert victim.secret in answer.text


# ------------------------------------------------------------------------------------------------------- by the schema


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_of_the_openapi_document_never_fail(served: Served, backend: str, mode: str):
    """Requests drawn from the OpenAPI document, and from its opposite: no 5xx, and every answer as it is described."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis: pip install 'areal_actors[fuzz]'")
    if settings.default.max_examples < LONG and (backend == "trio") is (mode == "positive"):
        pytest.skip("each way on one event loop; nox -s fuzz_http takes both on both")
    schema = schemathesis.openapi.from_dict(served.http.get("/openapi.json").json())
    for result in schema.get_all_operations():
        operation = result.ok()
        if (
            mode == "positive" or operation.body or operation.path_parameters or operation.query
        ):  # others have no opposite
            fuzz(served, operation, schemathesis.GenerationMode(mode))


def fuzz(served: Served, operation: Any, mode: Any) -> None:
    """Send what fits one operation, or does not, with the key that opens it."""
    is_admin = "adminKey" in str(operation.definition.raw)

    @settings(QUIET, max_examples=settings.default.max_examples // 15, database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if served.record(served.tenants[0]).is_ended:
            served.tenants[0] = served.open()
        key = served.admin if is_admin else {"authorization": f"Bearer {served.tenants[0].key}"}
        check(case, case.call(base_url=served.url, headers={**(case.headers or {}), **key}))

    send()


def check(case: Any, response: Any) -> None:
    """No 5xx; the type of the body is described."""
    from schemathesis.checks import content_type_conformance, not_a_server_error

    # A request that HTTP itself refuses has no id, and no body of ours.
    checks = [not_a_server_error, *([content_type_conformance] if "x-request-id" in response.headers else [])]
    case.validate_response(response, checks=checks)

    assert response.status_code < 500
