"""The service is killed and started again, on the same port, in the middle of an episode: its agent notices nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import TaskStatus
from openai import AsyncOpenAI
from tests.plugins import skipping_without_plugin

from areal_actors.domain import JournalEvent, SessionId, TurnEnded
from areal_actors.errors import JournalError
from areal_actors.journal import MemoryJournal
from areal_actors.messages import CollectSession
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.proxy import ProxyConfig
from areal_actors.rendering import Renderer, create_renderer
from areal_actors.run.inference import Inference, InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine, script_answers

pytestmark = [
    pytest.mark.anyio,
    # At [DONE] the SDK leaves its generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

ADMIN = {"Authorization": "Bearer admin"}


@cache
def renderer() -> Renderer:
    """A real renderer; it has no state worth resetting."""
    return create_renderer(create_tiny_tokenizer())


def sampled(text: str) -> list[int]:
    """What a model samples to say ``text``, end of turn included."""
    return [*renderer().encode(text, is_start=False).tolist(), renderer().stop_token_ids[0]]


class Hanging(MemoryJournal):
    """Writes the next turn when it is to hang, and then says nothing more until it is ``released``, and broken."""

    def __init__(self, events: Sequence[JournalEvent] = ()) -> None:
        super().__init__(events)
        self.is_hanging = False
        self.loses = False
        """Whether what hangs is not even written."""
        self.reached, self.released = anyio.Event(), anyio.Event()

    async def write(self, *events: JournalEvent) -> None:
        is_turn = isinstance(events[0], TurnEnded)
        if not (self.is_hanging and is_turn and self.loses):
            await super().write(*events)
        if self.is_hanging and is_turn:
            self.reached.set()
            await self.released.wait()
            raise JournalError("killed")


class Service:
    """One life of the service."""

    def __init__(self, journal: MemoryJournal, *answers: str, port: int = 0) -> None:
        self.engine = EchoEngine(script_answers(*map(sampled, answers)), vocab_size=renderer().vocab_size)
        self.journal = journal
        self.port = port
        self.inference: Inference
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        proxy = ProxyConfig(port=self.port, admin_key="admin", drain_seconds=0)
        with self._scope:
            async with open_actors(
                InferenceConfig(proxy=proxy), engine=self.engine, renderer=renderer(), journal=self.journal
            ) as self.inference:
                self.port = int(self.inference.endpoint.url.rsplit(":", 1)[1])
                task_status.started()
                await anyio.sleep_forever()
        self._ended.set()

    async def kill(self) -> list[JournalEvent]:
        """Stop at once; returns what was written by then."""
        events = list(self.journal.events)
        self._scope.cancel()
        if isinstance(self.journal, Hanging):
            self.journal.released.set()
        await self._ended.wait()
        return events

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def serving() -> AsyncIterator[Any]:
    """Tasks for lives of the service, and an end to all of them."""
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            yield tasks
            tasks.cancel_scope.cancel()


class Episode:
    """An agent of the ``openai`` SDK, with its ordinary retries: it talks on, turn by turn."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self.client = client
        self.messages: list[Any] = []
        self.ids: list[str] = []

    async def turn(self, text: str, *, is_streaming: bool = False) -> None:
        self.messages.append({"role": "user", "content": text})
        asked = {"model": "any", "messages": self.messages, "max_tokens": 32}
        if is_streaming:
            chunks = [chunk async for chunk in await self.client.chat.completions.create(stream=True, **asked)]
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            self.ids.append(chunks[0].id)
        else:
            completion = await self.client.chat.completions.create(**asked)
            content = completion.choices[0].message.content
            self.ids.append(completion.id)
        self.messages.append({"role": "assistant", "content": content})


@pytest.mark.parametrize("loses", [False, True], ids=["after it was durable", "before it was durable"])
async def test_episode_continues_when_service_is_killed(loses: bool):  # noqa: FBT001 - a parameter of the test
    """The second turn is killed on its way: its retry is answered once, from the journal or anew, and the rest follows.

    The session's key and URL, the parents and their exact tokens, and the reward outlive the process; the export has
    every answered turn once.
    """
    journal = Hanging()
    journal.loses = loses
    async with serving() as tasks, httpx.AsyncClient() as http:
        first = Service(journal, "one", "two")
        await tasks.start(first.run)
        reply = await http.post(f"{first.url}/rl/start_session", json={"task_id": "t"}, headers=ADMIN)
        opened = reply.json()
        base_url = f"{first.url}/{opened['session_id']}/v1"
        async with AsyncOpenAI(base_url=base_url, api_key=opened["api_key"], max_retries=8) as client:
            episode = Episode(client)
            await episode.turn("a")
            rewarding = f"{first.url}/{opened['session_id']}/rl/set_reward"
            await http.post(rewarding, json={"reward": 0.5}, headers={"x-api-key": opened["api_key"]})
            journal.is_hanging = True
            async with anyio.create_task_group() as asking:
                asking.start_soon(episode.turn, "b")
                await journal.reached.wait()
                written = await first.kill()
                second = Service(MemoryJournal(written), *(["two"] if loses else []), "three", port=first.port)
                await tasks.start(second.run)
            await episode.turn("c")
        end = {"api_key": opened["api_key"], "final_reward": 1.0}
        headers = {"Authorization": f"Bearer {opened['api_key']}"}
        await http.post(f"{second.url}/rl/finalize", json=end, headers=headers)
        export = {"session_id": opened["session_id"], "discount": 1.0, "style": "concat"}
        rows = (await http.post(f"{second.url}/export_trajectories", json=export, headers=ADMIN)).json()
        record = await second.inference.sessions.ask(CollectSession(session=SessionId(opened["session_id"])))
    texts = [message["content"] for message in episode.messages if message["role"] == "assistant"]

    assert ["one", "two", "three"] == texts
    assert episode.ids == [turn.id for turn in record.interactions]
    assert [None, *episode.ids[:2]] == [turn.token_parent for turn in record.interactions]
    assert [0.5, None, 1.0] == [turn.reward for turn in record.interactions]
    assert [2, 2 if loses else 1] == [len(first.engine.requests), len(second.engine.requests)]
    assert first.engine.requests[1].key == second.engine.requests[0].key or not loses
    assert (1, 3) == (len(rows["trajectories"]), rows["num_turns"])
    assert is_verified(second.journal, num_turns=3)


def is_verified(journal: MemoryJournal, *, num_turns: int) -> bool:
    """Whether every turn has a digest that fits it and those before it."""
    with skipping_without_plugin():
        from areal_actors_evals.verifying import Verification, verify_turns
    found = Verification(run="")
    turns = (event for event in journal.events if isinstance(event, TurnEnded))
    assert len(list(verify_turns(turns, found, where="journal"))) == num_turns, found
    return not found.differences and not found.num_turns_without_digest
