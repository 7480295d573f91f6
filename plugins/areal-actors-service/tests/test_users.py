"""Keys of users over HTTP: what they open and what they do not, and what a key may be; on both event loops."""

from __future__ import annotations

import logging

import httpx
import openai
import pytest
from tests.proxy.plain import CHAT, bearer
from user_keys import BODY, MESSAGES, code, served

from areal_actors.errors import ConfigError
from areal_actors.proxy import ProxyConfig
from areal_actors_testing.serving import open_scripted_proxy

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2?|openai|anthropic|httpcore2?):ResourceWarning"),
]


# ------------------------------------------------------------------------------------------------- what it opens


async def test_user_key_starts_sessions(keys_path):
    """The session's key and URL work as everybody's do; its metadata say whose it is."""
    async with served(keys_path) as service:
        key = await service.create(experiment="sums", trial="one")
        session = await service.session(key, task_id="t")
        answers = [
            await service.ask(session["api_key"]),
            await service.ask(None, f"/{session['session_id']}{CHAT}"),
            await service.ask(key["key"], f"/{session['session_id']}{CHAT}"),
            await service.ask(key["key"], session_id=session["session_id"]),
        ]
        rewarded = await service.http.post("/rl/set_reward", json={"reward": 1}, headers=bearer(session["api_key"]))
        mine = {"session_id": session["session_id"]}
        ended = await service.http.post("/rl/finalize", json=mine | {"final_reward": 2}, headers=bearer(key["key"]))
        exported = await service.http.post("/export_trajectories", json=mine, headers=bearer(key["key"]))

    assert [200] * 4 == [answer.status_code for answer in answers]
    assert (200, 200) == (rewarded.status_code, ended.status_code)
    assert ended.json()["interaction_count"] == 4
    assert len(exported.json()["trajectories"]) >= 1


async def test_user_key_does_not_see_sessions_of_others(keys_path):
    """Neither by name nor by URL, and in the words in which one is refused that was never started."""
    async with served(keys_path) as service:
        ada, bob = await service.create("ada"), await service.create("bob")
        session = (await service.session(ada))["session_id"]
        texts = []
        for name in (session, "task-none"):
            answers = [
                await service.ask(bob["key"], session_id=name),
                await service.ask(bob["key"], f"/{name}{CHAT}"),
                await service.http.post(f"/{name}/rl/end_session", headers=bearer(bob["key"])),
                await service.http.post(
                    "/rl/set_reward", json={"session_id": name, "reward": 1}, headers=bearer(bob["key"])
                ),
                await service.http.post("/export_trajectories", json={"session_id": name}, headers=bearer(bob["key"])),
            ]
            assert [(404, "not_found")] * 5 == [code(answer) for answer in answers]
            texts.append([answer.text.replace(name, "…") for answer in answers])
        own = await service.ask(ada["key"], session_id=session)

    assert texts[0] == texts[1]
    assert own.status_code == 200


async def test_user_key_without_session_is_plain_inference(keys_path):
    """Plain inference; no session is left of it, and a reward for it says what to do."""
    async with served(keys_path) as service:
        key = await service.create(max_sessions=0)
        client = openai.AsyncOpenAI(base_url=f"{service.proxy.url}/v1", api_key=key["key"], http_client=service.http)
        answer = await client.chat.completions.create(model="m", messages=MESSAGES)
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        counted = await service.ask(key["key"], "/v1/messages/count_tokens")
        reward = await service.http.post("/rl/set_reward", json={"reward": 1}, headers=bearer(key["key"]))
        (listed,) = (await service.http.get("/keys", headers=service.proxy.admin_headers)).json()["data"]
        left = len(service.proxy.sessions._store)

    assert ("one two three ", "one two three ") == (answer.choices[0].message.content, said)
    assert {"input_tokens": 1} == counted.json()
    assert (401, "invalid_api_key") == code(reward)
    assert "start_session" in reward.json()["error"]["message"]
    assert (0, 6) == (left, listed["tokens_today"])


async def test_user_key_cannot_administrate(keys_path):
    """A user's key, a session's key and none issue, list and revoke nothing."""
    async with served(keys_path) as service:
        key = await service.create()
        session = await service.session(key)
        for headers in ({}, bearer(key["key"]), bearer(session["api_key"])):
            for method, place in (("POST", "/keys"), ("GET", "/keys"), ("DELETE", f"/keys/{key['id']}")):
                assert (401, "invalid_api_key") == code(await service.http.request(method, place, headers=headers))
        assert (await service.start(key)).status_code == 200


async def test_service_without_users_has_no_key_routes(keys_path):
    """It says so, and what looks like a user's key opens nothing."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        created = await http.post("/keys", json={"user": "ada"}, headers=proxy.admin_headers)
        asked = await http.post(CHAT, json=BODY, headers=bearer("sk-user-x"))
        started = await http.post("/rl/start_session", headers=bearer("sk-user-x"))

    assert [(404, "not_found"), *[(401, "invalid_api_key")] * 2] == [code(a) for a in (created, asked, started)]
    assert not keys_path.exists()


async def test_session_key_is_not_a_user_key(keys_path):
    """A session cannot be given a key that would be taken for a user's."""
    async with served(keys_path) as service:
        key = await service.create()

        assert (await service.start(key, api_key="sk-user-mine")).status_code == 400
        assert (await service.session(key, api_key="my-own-key"))["api_key"] == "my-own-key"


async def test_session_key_works_for_other_clients(keys_path):
    """Of a key that was used twice, the session that it opens now counts."""
    async with served(keys_path) as service:
        key = await service.create(max_requests_per_minute=1)
        await service.session(key, api_key="my-own-key")
        await service.ask("my-own-key")
        await service.http.post("/rl/end_session", headers=bearer("my-own-key"))
        started = await service.http.post(
            "/rl/start_session", json={"api_key": "my-own-key"}, headers=service.proxy.admin_headers
        )

        assert started.status_code == 200
        assert (await service.ask("my-own-key")).status_code == 200


# ------------------------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"user": None}, "user"),
        ({"user": 5}, "user"),
        ({"user": "a\nb"}, "user"),
        ({"max_sessions": -1}, "max_sessions"),
        ({"max_sessions": True}, "max_sessions"),
        ({"max_tokens_per_day": 2**60}, "max_tokens_per_day"),
        ({"max_requests_per_minute": "5"}, "max_requests_per_minute"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"expires_at": 5}, "expires_at"),
        ({"max_session": 5}, "max_session"),
    ],
)
async def test_key_request_with_a_wrong_field_is_refused(keys_path, fields, param):
    """By the name of the field; nothing is issued."""
    async with served(keys_path) as service:
        answer = await service.http.post("/keys", json={"user": "ada"} | fields, headers=service.proxy.admin_headers)
        listed = await service.http.get("/keys", headers=service.proxy.admin_headers)

    assert (400, param) == (answer.status_code, answer.json()["error"]["param"])
    assert [] == listed.json()["data"]


async def test_user_key_expires(keys_path):
    """At the time that was named, in any zone."""
    async with served(keys_path) as service:
        key = await service.create(expires_at="2999-01-01T01:00:00+01:00")

    assert 32472144000 == key["expires_at"]


async def test_keys_are_not_logged(keys_path, caplog):
    """Names and ids do."""
    with caplog.at_level(logging.DEBUG, logger="areal_actors"):
        async with served(keys_path) as service:
            key = await service.create("林")
            await service.ask(key["key"])
            await service.revoke(key)

    assert key["id"] in caplog.text
    assert "林" in caplog.text
    assert key["key"] not in caplog.text


# ------------------------------------------------------------------------------------------------- open sessions


async def test_open_sessions_are_allowed_on_loopback(keys_path):
    """No key, or the placeholder that an SDK insists on; a user's key still names its user, and only if it is one."""
    async with served(keys_path, open_sessions=True) as service:
        key = await service.create(max_sessions=0)
        statuses = [
            (await service.http.get("/rl/start_session", headers=headers)).status_code
            for headers in ({}, bearer("DUMMY"), bearer(key["key"]), bearer("sk-user-nobody"))
        ]
        exported = await service.http.post("/export_trajectories", json={"session_id": "x"})

    assert [200, 200, 429, 401] == statuses
    assert exported.status_code == 401


async def test_open_sessions_are_refused_elsewhere():
    """The configuration is refused, whatever the admin key."""
    with pytest.raises(ConfigError, match=r"proxy\.open_sessions"):
        async with open_scripted_proxy(
            config=ProxyConfig(host="0.0.0.0", admin_key="sk-long-enough", open_sessions=True)
        ):
            pass
