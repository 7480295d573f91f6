"""What users may use, and until when: quotas and revocation, over HTTP; on both event loops."""

from __future__ import annotations

from contextlib import closing

import anthropic
import anyio
import httpx2
import openai
import pytest
from tests.proxy.plain import CHAT, bearer
from user_keys import BODY, MESSAGES, code, served

from areal_actors.domain import TextDelta
from areal_actors_service.accounts import AccountStore

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2?|openai|anthropic|httpcore2?):ResourceWarning"),
]


# -------------------------------------------------------------------------------------------------------- quotas


async def test_quota_errors_are_understood_by_sdks(keys_path):
    """429 and 401 are the exceptions that they have for them, with our words and the time to wait."""
    async with served(keys_path) as service:
        key = await service.create(max_requests_per_minute=1)
        session = await service.session(key)
        ours = openai.AsyncOpenAI(
            base_url=f"{service.proxy.url}/v1", api_key=session["api_key"], http_client=service.http, max_retries=0
        )
        await ours.chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError, match="1 requests a minute") as limited:
            await ours.chat.completions.create(model="m", messages=MESSAGES)
        async with httpx2.AsyncClient() as http:
            theirs = anthropic.AsyncAnthropic(
                base_url=service.proxy.url, api_key=session["api_key"], http_client=http, max_retries=0
            )
            with pytest.raises(anthropic.RateLimitError) as also:
                await theirs.messages.create(model="m", messages=MESSAGES, max_tokens=9)
            await service.revoke(key)
            with pytest.raises(openai.AuthenticationError, match="not valid"):
                await ours.chat.completions.create(model="m", messages=MESSAGES)
            with pytest.raises(anthropic.AuthenticationError, match="not valid"):
                await theirs.messages.create(model="m", messages=MESSAGES, max_tokens=9)

    assert "quota_exceeded" == limited.value.code
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60
    assert "rate_limit_error" == also.value.body["error"]["type"]
    assert "quota_exceeded" == also.value.body["error"]["code"]


async def test_quota_of_sessions_holds_for_concurrent_starts(keys_path):
    """Twenty at once for five places: exactly five; one that ends makes room for one."""
    async with served(keys_path) as service:
        key = await service.create(max_sessions=5)
        answers = []

        async def start() -> None:
            answers.append(await service.start(key))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(start)
        opened = [answer.json() for answer in answers if answer.status_code == 200]
        refused = [code(answer) for answer in answers if answer.status_code != 200]
        await service.http.post("/rl/end_session", headers=bearer(opened[0]["api_key"]))
        again = [(await service.start(key)).status_code for _ in range(2)]
        capacity = (await service.http.post("/grant_capacity", headers=service.proxy.admin_headers)).json()["capacity"]

    assert 5 == len(opened)
    assert [(429, "quota_exceeded")] * 15 == refused
    assert [200, 429] == again
    assert capacity >= 1024 - 8


async def test_quota_of_tokens_runs_out(keys_path):
    """Of answers and of streams, all sessions together; a retry before midnight is not worth it."""
    async with served(keys_path) as service:
        key = await service.create(max_tokens_per_day=6)
        first, second = await service.session(key), await service.session(key)
        assert (await service.ask(first["api_key"])).status_code == 200
        assert (await service.ask(second["api_key"], stream=True)).status_code == 200
        refused = await service.ask(first["api_key"])
        plain = await service.ask(key["key"])
        counted = await service.http.post("/v1/messages/count_tokens", json=BODY, headers=bearer(first["api_key"]))

    assert [(429, "quota_exceeded")] * 2 == [code(refused), code(plain)]
    assert "midnight" in refused.json()["error"]["message"]
    assert "false" == refused.headers["x-should-retry"]
    assert counted.status_code == 200


async def test_quota_counts_a_stream_that_was_cut(keys_path):
    """Hanging up before the end is no way around a quota."""
    is_said = anyio.Event()

    async def script(_request):
        yield TextDelta(text="one ")
        yield TextDelta(text="two ")
        await is_said.wait()

    async with served(keys_path, script=script) as service:
        key = await service.create()
        session = await service.session(key)
        async with service.http.stream(
            "POST", CHAT, json=BODY | {"stream": True}, headers=bearer(session["api_key"])
        ) as answer:
            async for line in answer.aiter_lines():
                if "two" in line:
                    break
        used = 0
        with anyio.fail_after(5):
            while not used:
                listed = await service.http.get("/keys", headers=service.proxy.admin_headers)
                used = listed.json()["data"][0]["tokens_today"]

    assert 2 == used


async def test_quotas_of_users_are_separate(keys_path):
    """What one has used up, another has not; nor has whoever has no name."""
    async with served(keys_path) as service:
        ada, bob = [await service.create(name, max_requests_per_minute=1) for name in ("ada", "bob")]
        nobody = await service.http.post("/rl/start_session", headers=service.proxy.admin_headers)

        assert [200, 429] == [(await service.ask(ada["key"])).status_code for _ in range(2)]
        assert (await service.ask(bob["key"])).status_code == 200
        assert [200] * 3 == [(await service.ask(nobody.json()["api_key"])).status_code for _ in range(3)]


# ---------------------------------------------------------------------------------------------------- revocation


async def test_revoked_key_closes_its_sessions(keys_path):
    """The next request of each is refused, however it names its session; the administrator still ends and exports."""
    async with served(keys_path) as service:
        key, other = await service.create(), await service.create()
        session, spared = await service.session(key), await service.session(other)
        await service.ask(session["api_key"])
        revoked = await service.revoke(key)
        again = await service.revoke(key)
        name = session["session_id"]
        refused = [
            await service.ask(session["api_key"]),
            await service.ask(None, f"/{name}{CHAT}"),
            await service.ask(key["key"]),
            await service.start(key),
            await service.http.post("/rl/set_reward", json={"reward": 1}, headers=bearer(session["api_key"])),
        ]
        body = {"session_id": name, "final_reward": 1}
        ended = await service.http.post("/rl/end_session", json=body, headers=service.proxy.admin_headers)
        rows = await service.http.post("/export_trajectories", json=body, headers=service.proxy.admin_headers)

        assert (await service.ask(spared["api_key"])).status_code == 200
    assert (200, revoked.json()) == (again.status_code, again.json())
    assert revoked.json()["revoked_at"] is not None
    assert [(401, "invalid_api_key")] * 5 == [code(answer) for answer in refused]
    assert (200, 200) == (ended.status_code, rows.status_code)
    assert 1 == len(rows.json()["trajectories"])


async def test_revocation_during_starts_leaves_no_session(keys_path):
    """Whatever was started while the key was revoked is closed with it."""
    async with served(keys_path) as service:
        key = await service.create()
        started = []

        async def start() -> None:
            answer = await service.start(key)
            if answer.status_code == 200:
                started.append(answer.json()["api_key"])

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(start)
            tasks.start_soon(service.revoke, key)
            for _ in range(5):
                tasks.start_soon(start)
        answers = [(await service.ask(secret)).status_code for secret in started]

        assert (await service.start(key)).status_code == 401
    assert [401] * len(started) == answers


async def test_revocation_of_an_unknown_key_is_refused(keys_path):
    """404, with the name that was given."""
    async with served(keys_path) as service:
        answer = await service.revoke({"id": "key_nobody"})

    assert (404, "not_found") == code(answer)


async def test_service_notices_keys_of_the_command_line(keys_path):
    """Another process writes to the file: a new key opens at once, a revoked one closes soon."""
    async with served(keys_path, save_seconds=0.01) as service:
        assert (await service.ask("sk-user-nobody")).status_code == 401
        with closing(AccountStore(keys_path)) as store:
            from areal_actors_service.accounts import AccountBook, Claim

            issued = AccountBook().issue(Claim(user="ada"), 100.0)
            store.put_key(issued.user, issued.key)
            session = await service.session({"key": issued.secret})
            assert (await service.ask(session["api_key"])).status_code == 200
            store.revoke(issued.key.id, 150.0)
        with anyio.fail_after(5):
            while (await service.ask(session["api_key"])).status_code == 200:
                pass


async def test_users_survive_a_restart(keys_path):
    """Keys, revocations and what was used today; sessions that another process has started are asked for once."""
    async with served(keys_path) as service:
        key, revoked = await service.create("林", max_tokens_per_day=3), await service.create("林")
        await service.revoke(revoked)
        assert (await service.ask(key["key"])).status_code == 200
    async with served(keys_path) as service:
        refused = [code(await service.ask(secret["key"])) for secret in (key, revoked)]
        listed = (await service.http.get("/keys", headers=service.proxy.admin_headers)).json()["data"]

    assert [(429, "quota_exceeded"), (401, "invalid_api_key")] == refused
    assert ["林"] * 2 == [shown["user"] for shown in listed]
    assert [False, True] == [shown["revoked_at"] is not None for shown in listed]
    assert not any("key" in shown for shown in listed)
