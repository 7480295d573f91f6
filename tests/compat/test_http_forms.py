"""The documented forms of HTTP, row by row: raw requests and both SDKs, against the real proxy and sessions."""

from __future__ import annotations

import io
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from tests.client.service import open_service
from tests.compat.tiny_model import MESSAGES
from tests.proxy.stack import open_stack, sampled

from areal_actors import Inference, InferenceConfig
from areal_actors.cache import to_arrays
from areal_actors.client import parse_episode
from areal_actors.messages import CollectSession
from areal_actors.proxy import ProxyConfig
from areal_actors.rollouts.staleness import CapacityLimits

pytestmark = pytest.mark.anyio

QUESTION = {"model": "default", "messages": MESSAGES}


class Caller:
    """One HTTP client, and the administrator's key."""

    def __init__(self, inference: Inference, http: httpx.AsyncClient) -> None:
        self.inference, self.http = inference, http
        self.admin = bearer(inference.endpoint.admin_key)

    async def start(self, path: str = "/rl/start_session", **arguments: Any) -> dict[str, Any]:
        started = await self.http.post(path, json={"task_id": "task-0-0"} | arguments, headers=self.admin)
        found: dict[str, Any] = started.raise_for_status().json()
        return found

    async def ask(self, path: str, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=QUESTION | options.pop("body", {}), **options)

    async def rewards(self, session: str) -> list[float | None]:
        record = await self.inference.sessions.ask(CollectSession(session=session))
        return [interaction.reward for interaction in record.interactions]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Service:
    """Opens everything for one test."""

    def __init__(self, config: InferenceConfig | None = None) -> None:
        self._opening = open_service(config)

    async def __aenter__(self) -> Caller:
        inference = await self._opening.__aenter__()
        self._http = httpx.AsyncClient(base_url=inference.endpoint.url, timeout=30)
        return Caller(inference, self._http)

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        await self._opening.__aexit__(*error)


async def test_capacity_is_granted() -> None:
    """``POST /grant_capacity`` answers with a number; it is the administrator's."""
    async with Service() as caller:
        granted = await caller.http.post("/grant_capacity", headers=caller.admin)
        refused = await caller.http.post("/grant_capacity")

    assert isinstance(granted.json()["capacity"], int)
    assert 401 == refused.status_code


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/rl/start_session"), ("POST", "/rl/v1/start_session"), ("GET", "/rl/v1/start_session")],
)
async def test_a_session_starts(method: str, path: str) -> None:
    """With an id that begins with the caller's task, cannot be guessed, and a key."""
    async with Service() as caller:
        arguments = {"task_id": "task-0-0"}
        given = {"params": arguments} if method == "GET" else {"json": arguments}
        one, two = [(await caller.http.request(method, path, headers=caller.admin, **given)).json() for _ in range(2)]

    assert {"session_id", "api_key"} <= set(one)
    assert one["session_id"].startswith("task-0-0-")
    assert one["session_id"] != two["session_id"]
    assert 16 <= len(one["session_id"]) - len("task-0-0-")


async def test_without_capacity_a_session_waits() -> None:
    """429, and when to try again."""
    limits = CapacityLimits(max_concurrent=1, batch_size=1, max_staleness=0)
    async with Service(InferenceConfig(limits=limits)) as caller:
        await caller.start()
        refused = await caller.http.post("/rl/start_session", headers=caller.admin)

    assert 429 == refused.status_code
    assert 0 < float(refused.headers["retry-after"])


@pytest.mark.parametrize("key", [None, "DUMMY"])
async def test_the_url_of_a_session_opens_it(key: str | None) -> None:
    """Under any key or none; a wrong session is none."""
    headers = {} if key is None else bearer(key)
    async with Service() as caller:
        session = (await caller.start())["session_id"]
        answered = await caller.ask(f"/{session}/v1/chat/completions", headers=headers)
        missing = await caller.ask("/task-0-0-unknown/v1/chat/completions", headers=headers)

    assert "fine" == answered.json()["choices"][0]["message"]["content"]
    assert missing.status_code in (401, 404)


async def test_session_urls_can_be_switched_off() -> None:
    """Then the key is needed beside the URL."""
    async with Service(InferenceConfig(proxy=ProxyConfig(session_urls=False))) as caller:
        started = await caller.start()
        path = f"/{started['session_id']}/v1/chat/completions"
        refused = await caller.ask(path, headers=bearer("DUMMY"))
        answered = await caller.ask(path, headers=bearer(started["api_key"]))

    assert (401, 200) == (refused.status_code, answered.status_code)


async def test_the_key_of_a_session_opens_it() -> None:
    """As a bearer, as ``x-api-key``, or beside the session's id in the query or the body."""
    async with Service() as caller:
        started = await caller.start()
        key, session = started["api_key"], started["session_id"]
        codes = [
            (await caller.ask("/v1/chat/completions", **options)).status_code
            for options in (
                {"headers": bearer(key)},
                {"headers": {"x-api-key": key}},
                {"headers": bearer(key), "params": {"session_id": session}},
                {"headers": bearer(key), "body": {"session_id": session}},
                {"headers": caller.admin, "params": {"session_id": session}},
            )
        ]
        other = (await caller.start())["session_id"]
        foreign = await caller.ask("/v1/chat/completions", headers=bearer(key), params={"session_id": other})

        assert [200] * 5 == codes
        assert foreign.status_code in (401, 403, 404)
        assert [None] * 5 == await caller.rewards(session)


@pytest.mark.parametrize("prefix", ["", "/v1", "/v1/v1"])
async def test_a_base_url_may_be_joined_in_any_way(prefix: str) -> None:
    """``/v1`` twice, or not at all, with and without the session before it."""
    async with Service() as caller:
        started = await caller.start()
        by_key = await caller.ask(f"{prefix}/chat/completions", headers=bearer(started["api_key"]))
        by_url = await caller.ask(f"/{started['session_id']}{prefix}/chat/completions")

    assert (200, 200) == (by_key.status_code, by_url.status_code)


async def test_every_dialect_answers_on_a_session() -> None:
    """OpenAI's chat and Responses, Anthropic's messages, through the SDKs; any model's name is the policy's."""
    async with Service() as caller:
        started = await caller.start()
        base = f"{caller.inference.endpoint.url}/{started['session_id']}"
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="DUMMY") as client:
            chat = await client.chat.completions.create(model="gpt-3.5-turbo", messages=MESSAGES)  # type: ignore[arg-type]
            response = await client.responses.create(model="default", input="What is 2+2?")
        async with anthropic.AsyncAnthropic(base_url=base, api_key="DUMMY") as client:
            message = await client.messages.create(model="claude", max_tokens=8, messages=MESSAGES)  # type: ignore[arg-type]

    assert "fine" == chat.choices[0].message.content == response.output_text == message.content[0].text  # type: ignore[union-attr]


@pytest.mark.parametrize("prefix", ["/rl", "/rl/v1"])
async def test_rewards_are_set(prefix: str) -> None:
    """By either name of the id, or for the last one; in the body or the query; again replaces."""
    async with Service() as caller:
        started = await caller.start()
        headers, session = bearer(started["api_key"]), started["session_id"]
        ids = [(await caller.ask("/v1/chat/completions", headers=headers)).json()["id"] for _ in range(3)]
        path = f"{prefix}/set_reward"
        replies = [
            await caller.http.post(path, json={"interaction_id": ids[0], "reward": 0.1}, headers=headers),
            await caller.http.post(path, params={"completion_id": ids[1], "reward": 0.2}, headers=headers),
            await caller.http.post(path, json={"reward": 0.9}, headers=headers),
            await caller.http.post(f"/{session}{prefix}/set_reward", json={"reward": 0.3}, headers=headers),
        ]

        assert {"success"} == {reply.json()["status"] for reply in replies}
        assert [0.1, 0.2, 0.3] == await caller.rewards(session)


async def test_wrong_rewards_are_refused() -> None:
    """Unknown sessions and completions are 404; what is not a number is 400."""
    async with Service() as caller:
        started = await caller.start()
        headers = bearer(started["api_key"])
        await caller.ask("/v1/chat/completions", headers=headers)
        unknown = {"completion_id": "chatcmpl-unknown", "reward": 1}
        codes = [
            (await caller.http.post("/rl/set_reward", json=unknown, headers=headers)).status_code,
            (await caller.http.post("/task-0-0-unknown/rl/set_reward", json={"reward": 1})).status_code,
            (await caller.http.post("/rl/set_reward", params={"reward": "nan"}, headers=headers)).status_code,
        ]

        assert [404, 404, 400] == codes
        assert [None] == await caller.rewards(started["session_id"])


async def test_a_session_ends() -> None:
    """With the number of its interactions; completions get 410 afterwards, and rewards are still taken."""
    async with Service() as caller:
        started = await caller.start()
        session, headers = started["session_id"], bearer(started["api_key"])
        await caller.ask(f"/{session}/v1/chat/completions")
        ended = await caller.http.post(f"/{session}/rl/end_session", headers=headers)
        late = await caller.ask(f"/{session}/v1/chat/completions")
        rewarded = await caller.http.post(f"/{session}/rl/set_reward", json={"reward": 0.5}, headers=headers)

        assert 1 == ended.json()["interaction_count"]
        assert isinstance(ended.json()["message"], str)
        assert (410, 200) == (late.status_code, rewarded.status_code)
        assert [0.5] == await caller.rewards(session)


async def test_a_session_is_finalized() -> None:
    """The last completed interaction gets the final reward, in place of an earlier one, and the session ends."""
    async with Service() as caller:
        started = await caller.start("/rl/v1/start_session")
        headers = bearer(started["api_key"])
        for _ in range(2):
            await caller.ask("/v1/chat/completions", headers=headers)
        await caller.http.post("/rl/v1/set_reward", json={"reward": 0.5}, headers=headers)
        final = await caller.http.post("/rl/v1/finalize", json={"final_reward": 1.0}, headers=headers)
        late = await caller.ask("/v1/chat/completions", headers=headers)

        assert (200, 410) == (final.status_code, late.status_code)
        assert [None, 1.0] == await caller.rewards(started["session_id"])


async def _talk(caller: Caller) -> str:
    """Two answers to one question and a third after one of them: a tree with branches, rewarded."""
    started = await caller.start()
    session: str = started["session_id"]
    path = f"/{session}/v1/chat/completions"
    for _ in range(2):
        answer = (await caller.ask(path)).json()["choices"][0]["message"]
    more = [*MESSAGES, answer, {"role": "user", "content": "Sure?"}]
    await caller.ask(path, body={"messages": more})
    await caller.http.post("/rl/end_session", json={"final_reward": 1.0}, headers=bearer(started["api_key"]))
    return session


@pytest.mark.parametrize("style", ["individual", "concat", "tree"])
async def test_a_session_is_exported(style: str) -> None:
    """A versioned document that round-trips to the arrays, the same arrays in binary, and twice the same."""
    async with Service() as caller:
        wanted = {"session_id": await _talk(caller), "discount": 0.9, "style": style}
        binary = {"accept": "application/x-npz"}
        document, again, packed = [
            await caller.http.post("/export_trajectories", json=wanted, headers=caller.admin | more)
            for more in ({}, {}, binary)
        ]
    arrays = np.load(io.BytesIO(packed.content), allow_pickle=False)
    expected = to_arrays(parse_episode(document.json()).trajectories)

    assert (2 if style == "tree" else 1) == document.json()["version"]
    assert document.json() == again.json()
    assert "application/x-npz" == packed.headers["content-type"]
    assert set(expected) == set(arrays)
    assert ("predecessors" in expected) == (style == "tree")
    assert all(np.array_equal(expected[name], arrays[name]) for name in expected)


async def test_defaults_are_the_documented_ones() -> None:
    """Temperature and top_p of 1, and 512 new tokens where the client names none."""
    async with open_stack(sampled("fine")) as stack, httpx.AsyncClient() as http:
        answered = await http.post(f"{stack.session.base_url}/chat/completions", json=QUESTION)
        sampling = stack.engine.requests[-1].sampling

    assert 200 == answered.status_code
    assert (1.0, 1.0, 512) == (sampling.temperature, sampling.top_p, sampling.max_new_tokens)


async def test_unstored_answer_is_not_trained() -> None:
    """Chat honours ``store: false`` and says so in the export; Responses does not, whose clients send it by habit."""
    async with Service() as caller:
        started = await caller.start()
        session, headers = started["session_id"], bearer(started["api_key"])
        chat = await caller.ask(f"/{session}/v1/chat/completions", body={"store": False})
        body = {"model": "default", "input": "What is 2+2?", "store": False}
        response = await caller.http.post(f"/{session}/v1/responses", json=body)
        await caller.http.post(f"/{session}/rl/end_session", json={"final_reward": 1.0}, headers=headers)
        exported = await caller.http.post("/export_trajectories", json={"session_id": session}, headers=caller.admin)
        episode = parse_episode(exported.json())

    assert (200, 200) == (chat.status_code, response.status_code)
    assert [(chat.json()["id"], "not_stored")] == [(row.interaction, str(row.reason)) for row in episode.untrained]
    assert [(response.json()["id"],)] == [row.interactions for row in episode.trajectories]
