"""Keys of users over HTTP: what they open, what they do not, what they may use; on both event loops."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, closing

import anthropic
import anyio
import httpx
import httpx2
import openai
import pytest
from attrs import frozen

from areal_actors.accounts import AccountStore
from areal_actors.actors.accounts import UsersConfig
from areal_actors.client import create_http_client
from areal_actors.domain import TextDelta
from areal_actors.errors import ConfigError
from areal_actors.proxy import ProxyConfig
from areal_actors.testing.serving import ScriptedProxy, open_scripted_proxy
from areal_actors.testing.sessions import echo_script

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2?|openai|anthropic|httpcore2?):ResourceWarning"),
]

MESSAGES = [{"role": "user", "content": "one two three"}]
CHAT = "/v1/chat/completions"
BODY = {"messages": MESSAGES}


@frozen(kw_only=True)
class Service:
    """A proxy with users, and a client for it."""

    proxy: ScriptedProxy
    http: httpx.AsyncClient

    async def create(self, user: str = "ada", **fields) -> dict:
        """A new key."""
        answer = await self.http.post("/keys", json={"user": user, **fields}, headers=self.proxy.admin_headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def revoke(self, key: dict) -> httpx.Response:
        return await self.http.delete(f"/keys/{key['id']}", headers=self.proxy.admin_headers)

    async def start(self, key: dict, **fields) -> httpx.Response:
        return await self.http.post("/rl/start_session", json=fields, headers=bearer(key["key"]))

    async def session(self, key: dict, **fields) -> dict:
        answer = await self.start(key, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ask(self, secret: str | None, path: str = CHAT, **fields) -> httpx.Response:
        return await self.http.post(path, json=BODY | fields, headers={} if secret is None else bearer(secret))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@asynccontextmanager
async def served(path, *, script=echo_script, save_seconds: float = 60.0, **options):
    users = UsersConfig(path=path, save_seconds=save_seconds)
    async with (
        open_scripted_proxy(script, users=users, config=ProxyConfig(**options)) as proxy,
        create_http_client() as http,
    ):
        http.base_url = proxy.url
        yield Service(proxy=proxy, http=http)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.sqlite"


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# ------------------------------------------------------------------------------------------------------ what it opens


async def test_a_users_key_starts_sessions(path):
    """The session's key and URL work as everybody's do; its metadata say whose it is."""
    async with served(path) as service:
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


async def test_another_users_sessions_do_not_exist(path):
    """Neither by name nor by URL, and in the words in which one is refused that was never started."""
    async with served(path) as service:
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


async def test_a_users_key_alone_answers_and_trains_nothing(path):
    """Plain inference; no session is left of it, and a reward for it says what to do."""
    async with served(path) as service:
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


async def test_administration_is_the_administrators(path):
    """A user's key, a session's key and none issue, list and revoke nothing."""
    async with served(path) as service:
        key = await service.create()
        session = await service.session(key)
        for headers in ({}, bearer(key["key"]), bearer(session["api_key"])):
            for method, place in (("POST", "/keys"), ("GET", "/keys"), ("DELETE", f"/keys/{key['id']}")):
                assert (401, "invalid_api_key") == code(await service.http.request(method, place, headers=headers))
        assert (await service.start(key)).status_code == 200


async def test_a_service_without_users_has_no_keys(path):
    """It says so, and what looks like a user's key opens nothing."""
    async with open_scripted_proxy() as proxy, httpx.AsyncClient(base_url=proxy.url) as http:
        created = await http.post("/keys", json={"user": "ada"}, headers=proxy.admin_headers)
        asked = await http.post(CHAT, json=BODY, headers=bearer("sk-user-x"))
        started = await http.post("/rl/start_session", headers=bearer("sk-user-x"))

    assert [(404, "not_found"), *[(401, "invalid_api_key")] * 2] == [code(a) for a in (created, asked, started)]
    assert not path.exists()


async def test_a_session_key_is_not_a_users(path):
    """A session cannot be given a key that would be taken for a user's."""
    async with served(path) as service:
        key = await service.create()

        assert (await service.start(key, api_key="sk-user-mine")).status_code == 400
        assert (await service.session(key, api_key="my-own-key"))["api_key"] == "my-own-key"


async def test_a_session_key_may_change_hands(path):
    """Of a key that was used twice, the session that it opens now counts."""
    async with served(path) as service:
        key = await service.create(max_requests_per_minute=1)
        await service.session(key, api_key="my-own-key")
        await service.ask("my-own-key")
        await service.http.post("/rl/end_session", headers=bearer("my-own-key"))
        started = await service.http.post(
            "/rl/start_session", json={"api_key": "my-own-key"}, headers=service.proxy.admin_headers
        )

        assert started.status_code == 200
        assert (await service.ask("my-own-key")).status_code == 200


# ----------------------------------------------------------------------------------------------------------- quotas


async def test_the_sdks_read_what_is_refused(path):
    """429 and 401 are the exceptions that they have for them, with our words and the time to wait."""
    async with served(path) as service:
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


async def test_of_many_starts_at_once_so_many_succeed(path):
    """Twenty at once for five places: exactly five; one that ends makes room for one."""
    async with served(path) as service:
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


async def test_sampled_tokens_run_out(path):
    """Of answers and of streams, all sessions together; a retry before midnight is not worth it."""
    async with served(path) as service:
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


async def test_a_stream_that_is_cut_counts(path):
    """Hanging up before the end is no way around a quota."""
    is_said = anyio.Event()

    async def script(_request):
        yield TextDelta(text="one ")
        yield TextDelta(text="two ")
        await is_said.wait()

    async with served(path, script=script) as service:
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


async def test_users_do_not_share(path):
    """What one has used up, another has not; nor has whoever has no name."""
    async with served(path) as service:
        ada, bob = [await service.create(name, max_requests_per_minute=1) for name in ("ada", "bob")]
        nobody = await service.http.post("/rl/start_session", headers=service.proxy.admin_headers)

        assert [200, 429] == [(await service.ask(ada["key"])).status_code for _ in range(2)]
        assert (await service.ask(bob["key"])).status_code == 200
        assert [200] * 3 == [(await service.ask(nobody.json()["api_key"])).status_code for _ in range(3)]


# ---------------------------------------------------------------------------------------------------------- revocation


async def test_a_revoked_key_closes_its_sessions(path):
    """The next request of each is refused, however it names its session; the administrator still ends and exports."""
    async with served(path) as service:
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


async def test_a_revocation_races_starts(path):
    """Whatever was started while the key was revoked is closed with it."""
    async with served(path) as service:
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


async def test_an_unknown_key_cannot_be_revoked(path):
    """404, with the name that was given."""
    async with served(path) as service:
        answer = await service.revoke({"id": "key_nobody"})

    assert (404, "not_found") == code(answer)


async def test_what_the_command_line_does_is_noticed(path):
    """Another process writes to the file: a new key opens at once, a revoked one closes soon."""
    async with served(path, save_seconds=0.01) as service:
        assert (await service.ask("sk-user-nobody")).status_code == 401
        with closing(AccountStore(path)) as store:
            from areal_actors.accounts import AccountBook, Claim

            issued = AccountBook().issue(Claim(user="ada"), 100.0)
            store.put_key(issued.user, issued.key)
            session = await service.session({"key": issued.secret})
            assert (await service.ask(session["api_key"])).status_code == 200
            store.revoke(issued.key.id, 150.0)
        with anyio.fail_after(5):
            while (await service.ask(session["api_key"])).status_code == 200:
                pass


async def test_a_restart_forgets_nothing(path):
    """Keys, revocations and what was used today; sessions that another process has started are asked for once."""
    async with served(path) as service:
        key, revoked = await service.create("林", max_tokens_per_day=3), await service.create("林")
        await service.revoke(revoked)
        assert (await service.ask(key["key"])).status_code == 200
    async with served(path) as service:
        refused = [code(await service.ask(secret["key"])) for secret in (key, revoked)]
        listed = (await service.http.get("/keys", headers=service.proxy.admin_headers)).json()["data"]

    assert [(429, "quota_exceeded"), (401, "invalid_api_key")] == refused
    assert ["林"] * 2 == [shown["user"] for shown in listed]
    assert [False, True] == [shown["revoked_at"] is not None for shown in listed]
    assert not any("key" in shown for shown in listed)


# ------------------------------------------------------------------------------------------------------- what is asked


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
async def test_what_cannot_be_meant_is_refused(path, fields, param):
    """By the name of the field; nothing is issued."""
    async with served(path) as service:
        answer = await service.http.post("/keys", json={"user": "ada"} | fields, headers=service.proxy.admin_headers)
        listed = await service.http.get("/keys", headers=service.proxy.admin_headers)

    assert (400, param) == (answer.status_code, answer.json()["error"]["param"])
    assert [] == listed.json()["data"]


async def test_a_key_expires(path):
    """At the time that was named, in any zone."""
    async with served(path) as service:
        key = await service.create(expires_at="2999-01-01T01:00:00+01:00")

    assert 32472144000 == key["expires_at"]


async def test_keys_do_not_reach_the_log(path, caplog):
    """Names and ids do."""
    with caplog.at_level(logging.DEBUG, logger="areal_actors"):
        async with served(path) as service:
            key = await service.create("林")
            await service.ask(key["key"])
            await service.revoke(key)

    assert key["id"] in caplog.text
    assert "林" in caplog.text
    assert key["key"] not in caplog.text


# -------------------------------------------------------------------------------------------------------- open sessions


async def test_sessions_may_be_open_to_this_machine(path):
    """No key, or the placeholder that an SDK insists on; a user's key still names its user, and only if it is one."""
    async with served(path, open_sessions=True) as service:
        key = await service.create(max_sessions=0)
        statuses = [
            (await service.http.get("/rl/start_session", headers=headers)).status_code
            for headers in ({}, bearer("DUMMY"), bearer(key["key"]), bearer("sk-user-nobody"))
        ]
        exported = await service.http.post("/export_trajectories", json={"session_id": "x"})

    assert [200, 200, 429, 401] == statuses
    assert exported.status_code == 401


async def test_sessions_are_never_open_to_others():
    """The configuration is refused, whatever the admin key."""
    with pytest.raises(ConfigError, match=r"proxy\.open_sessions"):
        async with open_scripted_proxy(
            config=ProxyConfig(host="0.0.0.0", admin_key="sk-long-enough", open_sessions=True)
        ):
            pass
