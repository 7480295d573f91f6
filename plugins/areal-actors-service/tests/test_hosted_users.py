"""A host before several services: who is served by which, who has no place, and what strangers and neighbours get."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from attrs import define, field, frozen
from scripted_provider import ScriptedProvider, ScriptedService
from tests.proxy.stack import renderer, sampled

from areal_actors.client import OpenAIProxyClient, create_http_client
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import Accounts, CreateKey, DescribeEndpoint, RevokeKey
from areal_actors.proxy import ProxyConfig
from areal_actors.run.inference import Inference, InferenceConfig, open_actors
from areal_actors.sessions.manager import SessionsConfig
from areal_actors.testing.engines import EchoEngine, script_answers
from areal_actors_service.account_keeper import AccountKeeper
from areal_actors_service.config import UsersConfig
from areal_actors_service.entry import HostPeers, HostServer
from areal_actors_service.launcher import Launcher, LauncherConfig
from areal_actors_service.messages import StopServices, TrialId

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

ADMIN = {"authorization": "Bearer sk-admin-of-the-host"}
ADMIN_OF_SERVICES = "sk-admin-of-services"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "any", "messages": HELLO}


@define(kw_only=True, eq=False)
class EchoProvider(ScriptedProvider):
    """Services that are real but for their engine, which says whose it is."""

    users: Path
    services: dict[TrialId, Inference] = field(factory=dict)

    @asynccontextmanager
    async def open(self, trial: TrialId) -> AsyncIterator[ScriptedService]:
        """As ``ServiceProvider.open``."""
        engine = EchoEngine(script_answers(sampled(f"I am {trial.name}")), vocab_size=renderer().vocab_size)
        config = InferenceConfig(
            sessions=SessionsConfig(service_name=trial.home),
            proxy=ProxyConfig(admin_key=ADMIN_OF_SERVICES, drain_seconds=0.0),
            create_accounts=lambda: AccountKeeper(self.users, config=UsersConfig(save_seconds=0.05)),
        )
        async with open_actors(config, engine=engine, renderer=renderer()) as service:
            self.url = service.endpoint.url
            async with ScriptedProvider.open(self, trial) as running:
                running.admin_key = ADMIN_OF_SERVICES
                yield running


@frozen(kw_only=True)
class ServiceStack:
    """What is open."""

    url: str
    http: httpx.AsyncClient
    provider: EchoProvider
    accounts: Ref[Accounts]

    async def key_of(self, user: str, **names: Any) -> str:
        """A new key."""
        issued = await self.accounts.ask(CreateKey(user=user, **names))
        return issued.secret or ""

    async def ask(self, key: str | None, path: str = "/v1/chat/completions", **more: str) -> httpx.Response:
        """One turn."""
        headers = more if key is None else {"authorization": f"Bearer {key}", **more}
        return await self.http.post(f"{self.url}{path}", json=ASKED, headers=headers)

    async def services(self) -> list[dict[str, Any]]:
        """As the administrator sees them."""
        answer = await self.http.get(f"{self.url}/services", headers=ADMIN)
        found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
        return found


@asynccontextmanager
async def open_service_stack(directory: Path, **settings: Any) -> AsyncIterator[ServiceStack]:
    provider = EchoProvider(users=directory / "keys.sqlite")
    async with ActorSystem.open() as system, create_http_client() as http:
        hosting = await system.spawn(Launcher(provider, config=LauncherConfig(**settings)))
        accounts = await system.spawn(AccountKeeper(provider.users, config=UsersConfig(save_seconds=0.05)))
        peers = HostPeers(
            hosting=hosting,
            accounts=accounts,
            default=TrialId("shared", "trial"),
            admin_key=ADMIN["authorization"].removeprefix("Bearer "),
        )
        serving = await system.spawn(HostServer(peers, config=ProxyConfig(drain_seconds=0.0)))
        url = (await serving.ask(DescribeEndpoint())).url
        try:
            yield ServiceStack(url=url, http=http, provider=provider, accounts=accounts)
        finally:
            with anyio.CancelScope(shield=True):
                await hosting.ask(StopServices())


def text_of(answer: httpx.Response) -> str:
    found: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return found


async def test_host_selects_the_trial_by_key(tmp_path: Path):
    """Two users at one URL, an experiment of each; who names none shares the host's own. Each is started once."""
    async with open_service_stack(tmp_path) as hosted:
        keys = [
            await hosted.key_of("ada", experiment="sums", trial="one"),
            await hosted.key_of("bob", experiment="sums"),
        ]
        keys.append(await hosted.key_of("cat"))
        said = [text_of(await hosted.ask(key)) for key in [*keys, *keys]]
        listed = await hosted.services()

    assert ["I am sums/one", "I am sums/trial", "I am shared/trial"] * 2 == said
    assert {"sums/one": 1, "sums/trial": 1, "shared/trial": 1} == {each["id"]: each["starts"] for each in listed}
    assert "sk-" not in str(listed)


async def test_host_keeps_a_session_at_its_service(tmp_path: Path):
    """By key, by URL and by name, of an SDK; its user exports it, a neighbour cannot, and the administrator can."""
    async with open_service_stack(tmp_path) as hosted:
        ada, bob = await hosted.key_of("ada", experiment="sums"), await hosted.key_of("bob", experiment="words")
        await hosted.ask(bob)
        async with OpenAIProxyClient(hosted.url, admin_key=ada) as session:
            said = text_of(await hosted.ask(session.api_key))
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client:
                by_url = await client.chat.completions.create(**ASKED)
            await session.set_last_reward(1.0)
            wanted = {"session_id": session.session_id, "discount": 1.0, "style": "concat"}
            foreign = await hosted.http.post(
                f"{hosted.url}/export_trajectories", json=wanted, headers={"authorization": f"Bearer {bob}"}
            )
            peeked = await hosted.ask(bob, f"/v1/chat/completions?session_id={session.session_id}")
            await session.end_session()
            managed = await hosted.http.post(f"{hosted.url}/export_trajectories", json=wanted, headers=ADMIN)

    assert "I am sums/trial" == said == by_url.choices[0].message.content
    assert (404, 404, 200) == (foreign.status_code, peeked.status_code, managed.status_code)
    assert 2 == managed.json()["num_turns"]


async def test_host_starts_nothing_for_unknown_keys(tmp_path: Path):
    """No key, a made-up key of any kind, a made-up session, a key that was revoked: refused, before anything starts."""
    home = TrialId("sums", "trial").home
    made_up = f"{home}.0123456789abcdefghijkl"
    async with open_service_stack(tmp_path) as hosted:
        issued = await hosted.accounts.ask(CreateKey(user="ada", experiment="sums"))
        await hosted.accounts.ask(RevokeKey(key=issued.key.id))
        keys = [None, "sk-wrong", "sk-user-wrong", f"sk-{made_up}", issued.secret]
        statuses = [(await hosted.ask(key)).status_code for key in keys]
        by_url = await hosted.ask("none", f"/task-{made_up}/v1/chat/completions")
        hidden = [await hosted.http.get(f"{hosted.url}/{path}") for path in ("services", "keys")]
        health = await hosted.http.get(f"{hosted.url}/health")

    assert {401} == {*statuses, *(answer.status_code for answer in hidden)}
    assert 404 == by_url.status_code
    assert (200, 0) == (health.status_code, hosted.provider.num_starts.total())


async def test_host_refuses_a_revoked_key_and_its_sessions(tmp_path: Path):
    """At the host and at the service, which reads the same file."""
    async with open_service_stack(tmp_path) as hosted:
        issued = await hosted.accounts.ask(CreateKey(user="ada", experiment="sums"))
        headers = {"authorization": f"Bearer {issued.secret}"}
        started = await hosted.http.post(f"{hosted.url}/rl/start_session", headers=headers)
        session = started.raise_for_status().json()
        before = await hosted.ask(session["api_key"])
        await hosted.http.delete(f"{hosted.url}/keys/{issued.key.id}", headers=ADMIN)
        with anyio.fail_after(20):
            while (await hosted.ask(session["api_key"])).status_code != 401:  # noqa: ASYNC110 - of a file
                await anyio.sleep(0.01)
        after = await hosted.ask(issued.secret)

    assert (200, 401) == (before.status_code, after.status_code)


async def test_host_without_room_answers_with_retry_after(tmp_path: Path):
    """503 with Retry-After, in the words of whose client asks."""
    async with open_service_stack(tmp_path, max_services=1) as hosted:
        ada, bob = await hosted.key_of("ada", experiment="sums"), await hosted.key_of("bob", experiment="words")
        first = await hosted.ask(ada)
        openais = await hosted.ask(bob)
        anthropics = await hosted.ask(None, "/v1/messages", **{"x-api-key": bob})

    assert (200, 503, 503) == (first.status_code, openais.status_code, anthropics.status_code)
    assert "All 1 places" in openais.json()["error"]["message"]
    assert float(openais.headers["retry-after"]) >= 1
    assert "overloaded_error" == anthropics.json()["error"]["type"]


async def test_host_waits_for_a_service_that_died_and_reports_a_finished_one(tmp_path: Path):
    """A request that comes between two lives is answered by the second; after the end there is 410."""
    trial = TrialId("sums", "trial")
    async with open_service_stack(tmp_path, first_wait_seconds=0.05) as hosted:
        ada = await hosted.key_of("ada", experiment="sums")
        await hosted.ask(ada)
        hosted.provider.open_services[trial].end("It was killed.")
        answers = [await hosted.ask(ada) for _ in range(2)]
        (listed,) = await hosted.services()
        hosted.provider.open_services[trial].end(None)
        with anyio.fail_after(20):
            while (last := await hosted.ask(ada)).status_code in {200, 503}:  # noqa: ASYNC110 - over sockets
                await anyio.sleep(0.01)

    assert 200 == answers[-1].status_code
    assert (2, "It was killed.") == (listed["starts"], listed["failure"])
    assert 410 == last.status_code
