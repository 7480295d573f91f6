"""Users in front of the real session manager, and of proxies that have not started what they are asked about."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
from tests.proxy.stack import renderer, sampled

from areal_actors.domain import Credential, Quotas
from areal_actors.messages import CreateKey, DescribeEndpoint, DescribeOwner, ListKeys, OpenSession, RevokeKey
from areal_actors.proxy import ProxyServer
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine, script_answers
from areal_actors_service.account_keeper import AccountKeeper

pytestmark = pytest.mark.anyio

BODY = {"messages": [{"role": "user", "content": "why?"}]}


@asynccontextmanager
async def opened(path):
    """Two proxies before one session manager: the second has seen nothing of what the first one started."""
    engine = EchoEngine(script_answers(*[sampled("because")] * 9), vocab_size=renderer().vocab_size)
    limits = CapacityLimits(max_concurrent=4, batch_size=4)
    config = InferenceConfig(limits=limits, create_accounts=lambda: AccountKeeper(path))
    async with open_actors(config, engine=engine, renderer=renderer()) as inference:
        accounts, sessions = inference.accounts, inference.sessions
        other = ProxyServer(
            sessions=sessions, exports=inference.exports, capacity=inference.capacity, accounts=accounts
        )
        serving = await inference.system.spawn(other)
        urls = [inference.endpoint.url, (await serving.ask(DescribeEndpoint())).url]
        async with httpx.AsyncClient(base_url=urls[0]) as first, httpx.AsyncClient(base_url=urls[1]) as second:
            yield accounts, sessions, first, second


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def test_proxy_finds_the_user_of_a_session_started_elsewhere(tmp_path):
    """By its key and by its URL, started elsewhere: quotas hold, and a revoked key closes it."""
    async with opened(tmp_path / "keys.sqlite") as (accounts, sessions, first, second):
        issued = await accounts.ask(CreateKey(user="ada", experiment="sums"))
        session = (await first.post("/rl/start_session", headers=bearer(issued.secret))).json()
        anonymous = await sessions.ask(OpenSession(task="t"))
        owner = await sessions.ask(DescribeOwner(credential=Credential(key=session["api_key"])))
        places = [
            ("/v1/chat/completions", bearer(session["api_key"])),
            (f"/{session['session_id']}/v1/chat/completions", {}),
            ("/v1/chat/completions", bearer(anonymous.api_key)),
        ]
        before = [(await second.post(path, json=BODY, headers=headers)).status_code for path, headers in places * 2]
        await accounts.ask(RevokeKey(key=issued.key.id))
        after = [(await second.post(path, json=BODY, headers=headers)).status_code for path, headers in places]

    assert ("ada", issued.key.id) == (owner.user, owner.user_key)
    assert [200] * 6 == before
    assert [401, 401, 200] == after


async def test_proxy_notices_the_first_key(tmp_path):
    """Which was issued, and has started a session, elsewhere, after this proxy had heard that there were no keys."""
    async with opened(tmp_path / "keys.sqlite") as (accounts, sessions, first, second):
        anonymous = bearer((await sessions.ask(OpenSession(task="t"))).api_key)
        path = "/v1/chat/completions"
        before = await second.post(path, json=BODY, headers=anonymous)
        issued = await accounts.ask(CreateKey(user="ada", quotas=Quotas(max_requests_per_minute=1)))
        started = (await first.post("/rl/start_session", headers=bearer(issued.secret))).json()
        adas = [await second.post(path, json=BODY, headers=bearer(started["api_key"])) for _ in range(2)]
        after = await second.post(path, json=BODY, headers=anonymous)

    assert [200, 429] == [answer.status_code for answer in adas]
    assert (200, 200) == (before.status_code, after.status_code)


async def test_plain_inference_leaves_no_session(tmp_path):
    """Of capacity and of sessions; places for sessions are given back when they are refused for a quota."""
    async with opened(tmp_path / "keys.sqlite") as (accounts, _sessions, first, _):
        issued = await accounts.ask(CreateKey(user="ada"))
        answers = [await first.post("/v1/chat/completions", json=BODY, headers=bearer(issued.secret)) for _ in range(6)]
        view = (await first.get("/metrics")).text

    assert ["because"] * 6 == [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert 'areal_sessions{state="live"} 0' in view or "areal_sessions_live 0" in view, view


async def test_quotas_hold_with_the_real_session_manager(tmp_path):
    """Two places, of four that there are: the third start is refused and takes no place; an end makes room."""
    async with opened(tmp_path / "keys.sqlite") as (accounts, _sessions, first, second):
        from areal_actors.domain import Quotas

        issued = await accounts.ask(CreateKey(user="ada", quotas=Quotas(max_sessions=2)))
        started = [await proxy.post("/rl/start_session", headers=bearer(issued.secret)) for proxy in (first, second)]
        refused = [await first.post("/rl/start_session", headers=bearer(issued.secret)) for _ in range(9)]
        await first.post("/rl/end_session", headers=bearer(started[0].json()["api_key"]))
        again = await second.post("/rl/start_session", headers=bearer(issued.secret))

    assert [200, 200] == [answer.status_code for answer in started]
    assert {"quota_exceeded"} == {answer.json()["error"]["code"] for answer in refused}
    assert again.status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_quota_counts_a_repeated_answer_once(tmp_path, is_stream):
    """A retry whose first answer was lost on the way costs its user nothing, through whichever proxy it comes."""
    async with opened(tmp_path / "keys.sqlite") as (accounts, _sessions, first, second):
        issued = await accounts.ask(CreateKey(user="ada"))
        session = (await first.post("/rl/start_session", headers=bearer(issued.secret))).json()
        used, body = 0, BODY | {"stream": is_stream}
        for proxy, number in ((first, "0"), (first, "1"), (second, "2"), (second, "0")):
            headers = bearer(session["api_key"]) | {"x-stainless-retry-count": number}
            answer = await proxy.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
        with anyio.fail_after(10):
            while used < 2 * len(sampled("because")):  # told after the answer has been sent
                (listed,) = await accounts.ask(ListKeys())
                used = listed.num_tokens_today

    assert 2 * len(sampled("because")) == used
