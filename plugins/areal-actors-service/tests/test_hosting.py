"""Whose request it is: a host before a real service that a script has started, with real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from attrs import frozen
from prometheus_client.parser import text_string_to_metric_families
from scripted_provider import ScriptedProvider
from tests.proxy.stack import renderer, sampled

from areal_actors.client import OpenAIProxyClient, create_http_client
from areal_actors.errors import Unavailable
from areal_actors.kernel import ActorSystem, Ref
from areal_actors.messages import Accounts, CreateKey, DescribeEndpoint, RevokeKey
from areal_actors.proxy import ProxyConfig
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.sessions.manager import SessionsConfig
from areal_actors.testing.engines import EchoEngine, script_answers
from areal_actors_service.account_keeper import AccountKeeper
from areal_actors_service.config import UsersConfig
from areal_actors_service.entry import HostPeers, HostServer
from areal_actors_service.launcher import Launcher, LauncherConfig
from areal_actors_service.messages import TrialId

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

ADMIN = {"authorization": "Bearer sk-admin-of-the-host"}
SUMS, BROKEN = TrialId("sums", "one"), TrialId("broken", "one")
HELLO = [{"role": "user", "content": "Hello"}]


@frozen(kw_only=True)
class ServiceStack:
    """A host before the service of one trial; that of the other does not start."""

    url: str
    http: httpx.AsyncClient
    accounts: Ref[Accounts]
    provider: ScriptedProvider


@asynccontextmanager
async def open_service_stack(tmp_path: Path) -> AsyncIterator[ServiceStack]:
    users = UsersConfig(save_seconds=0.01)

    def create() -> AccountKeeper:
        return AccountKeeper(tmp_path / "keys.sqlite", config=users)

    engine = EchoEngine(script_answers(sampled("I am sums")), vocab_size=renderer().vocab_size)
    proxy = ProxyConfig(admin_key="sk-admin-scripted", drain_seconds=0.0)
    config = InferenceConfig(sessions=SessionsConfig(service_name=SUMS.home), proxy=proxy, create_accounts=create)
    async with (
        open_actors(config, engine=engine, renderer=renderer()) as service,
        ActorSystem.open() as system,
        create_http_client() as http,
    ):
        provider = ScriptedProvider(url=service.endpoint.url, failures={BROKEN: Unavailable("no model in /secret")})
        launcher = await system.spawn(Launcher(provider, config=LauncherConfig(first_wait_seconds=0.01)))
        accounts = await system.spawn(create())
        peers = HostPeers(hosting=launcher, accounts=accounts, default=BROKEN, admin_key="sk-admin-of-the-host")
        serving = await system.spawn(HostServer(peers, config=ProxyConfig(drain_seconds=0.0)))
        url = (await serving.ask(DescribeEndpoint())).url
        yield ServiceStack(url=url, http=http, accounts=accounts, provider=provider)


async def test_hosting_routes_a_key_to_its_trial(tmp_path: Path):
    """With nothing but a URL and a key; the session's own key and URL lead there, too."""
    async with open_service_stack(tmp_path) as hosted:
        issued = await hosted.accounts.ask(CreateKey(user="ada", experiment="sums", trial="one"))
        async with OpenAIProxyClient(hosted.url, admin_key=issued.secret) as session:
            async with openai.AsyncOpenAI(base_url=f"{hosted.url}/v1", api_key=session.api_key) as client:
                by_key = await client.chat.completions.create(model="any", messages=HELLO)
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client:
                by_url = await client.chat.completions.create(model="any", messages=HELLO)
            await session.set_last_reward(1.0)
        exported = await hosted.http.post(
            f"{hosted.url}/export_trajectories", json={"session_id": session.session_id}, headers=ADMIN
        )

    assert "I am sums" == by_key.choices[0].message.content == by_url.choices[0].message.content
    assert 200 == exported.status_code
    assert {SUMS: 1} == hosted.provider.num_starts


async def test_hosting_refuses_invalid_keys_and_sessions(tmp_path: Path):
    """Revoked, unknown and missing keys, sessions of nobody: refused in words that SDKs know; nothing is started."""
    async with open_service_stack(tmp_path) as hosted:
        issued = await hosted.accounts.ask(CreateKey(user="ada", experiment="sums", trial="one"))
        await hosted.accounts.ask(RevokeKey(key=issued.key.id))
        for key in (issued.secret, "sk-user-unknown", "sk-nobody", f"sk-{SUMS.home}.0123456789abcdefgh"):
            async with openai.AsyncOpenAI(base_url=f"{hosted.url}/v1", api_key=key) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="any", messages=HELLO)
        path = f"task-{SUMS.home}.0123456789abcdefgh/v1/chat/completions"
        unknown = await hosted.http.post(f"{hosted.url}/{path}", json={"messages": HELLO})
        aimless = await hosted.http.post(f"{hosted.url}/rl/start_session", json={}, headers=ADMIN)
        escape = await hosted.accounts.ask(CreateKey(user="eve", experiment="..", trial=".."))
        outside = await hosted.http.post(
            f"{hosted.url}/rl/start_session", json={}, headers={"authorization": f"Bearer {escape.secret}"}
        )

    assert [404, 400, 400] == [answer.status_code for answer in (unknown, aimless, outside)]
    assert 0 == hosted.provider.num_starts.total()


async def test_hosting_reports_unavailability_in_the_format_of_the_client(tmp_path: Path):
    """503 with the time to wait; why is the administrator's business. The default is for whoever names no trial."""
    async with open_service_stack(tmp_path) as hosted:
        issued = await hosted.accounts.ask(CreateKey(user="bob"))
        async with anthropic.AsyncAnthropic(base_url=hosted.url, api_key=issued.secret, max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as refused:
                await client.messages.create(model="any", max_tokens=4, messages=HELLO)
        services = await hosted.http.get(f"{hosted.url}/services", headers=ADMIN)
        hidden = await hosted.http.get(f"{hosted.url}/services")
        health = await hosted.http.get(f"{hosted.url}/health")

    assert (503, "overloaded_error") == (refused.value.status_code, refused.value.body["error"]["type"])
    assert "retry-after" in refused.value.response.headers
    assert "/secret" not in str(refused.value)
    assert ("broken/one", "no model in /secret") == (
        services.json()["data"][0]["id"],
        services.json()["data"][0]["failure"],
    )
    assert "sk-" not in services.text
    assert (401, 200) == (hidden.status_code, health.status_code)


async def test_hosting_serves_the_routes_for_keys(tmp_path: Path):
    """As at a service: created, listed without secrets, revoked."""
    async with open_service_stack(tmp_path) as hosted:
        created = await hosted.http.post(f"{hosted.url}/v1/keys", json={"user": "ada"}, headers=ADMIN)
        listed = await hosted.http.get(f"{hosted.url}/keys", headers=ADMIN)
        revoked = await hosted.http.delete(f"{hosted.url}/keys/{created.json()['id']}", headers=ADMIN)
        refused = await hosted.http.get(
            f"{hosted.url}/keys", headers={"authorization": f"Bearer {created.json()['key']}"}
        )

    assert [200, 200, 200, 401] == [answer.status_code for answer in (created, listed, revoked, refused)]
    assert created.json()["key"] not in listed.text


async def test_hosting_metrics_contain_those_of_services(tmp_path: Path):
    """With the label of their trial, in a text that Prometheus' parser reads; only the administrator gets them."""
    async with open_service_stack(tmp_path) as hosted:
        issued = await hosted.accounts.ask(CreateKey(user="ada", experiment="sums", trial="one"))
        async with OpenAIProxyClient(hosted.url, admin_key=issued.secret) as session:
            async with openai.AsyncOpenAI(base_url=session.base_url, api_key="none") as client:
                await client.chat.completions.create(model="any", messages=HELLO)
            by_user = await hosted.http.get(
                f"{hosted.url}/metrics", headers={"authorization": f"Bearer {issued.secret}"}
            )
            answer = await hosted.http.get(f"{hosted.url}/metrics", headers=ADMIN)
            own = f"{hosted.provider.url}/metrics"
            by_admin = await hosted.http.get(own, headers={"authorization": "Bearer sk-admin-scripted"})
            unnamed = await hosted.http.get(own)
            await session.set_last_reward(1.0)

    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    values = {(sample.name, *sample.labels.values()): sample.value for f in families.values() for sample in f.samples}
    assert 401 == by_user.status_code
    assert answer.text.count("# TYPE areal_build_info ") == 1
    assert 1 == values["areal_host_services", "running"]
    assert 1 == values["areal_host_service_starts", "sums/one"]
    assert 1 == values["areal_sessions_live", "sums/one"]
    assert ("areal_user_tokens_today", "ada") in values
    assert ["ada" in text for text in (by_admin.text, unnamed.text)] == [True, False]
    assert {"sums/one", None} == {sample.labels.get("trial") for sample in families["areal_build_info"].samples}
