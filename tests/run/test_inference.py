"""An app opens the actors inside its own event loop: sessions, rewards, rows, and an end without leftovers."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import cycle

import anyio
import pytest
from attrs import evolve, frozen
from openai import AsyncOpenAI, OpenAIError

from areal_actors.client import AgentSession, OpenAIProxyClient
from areal_actors.errors import EngineError, ModelError, NotFound, RewardError
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.worker import StepRunner
from areal_actors.journal import SqliteJournal
from areal_actors.kernel import Actor, ActorSystem, Message
from areal_actors.messages import CollectSession
from areal_actors.run.inference import InferenceConfig, open_inference

pytestmark = pytest.mark.anyio

CONFIG = InferenceConfig(engine=TorchEngineConfig(dtype="float32", max_concurrent=4, max_length=256))


async def test_embedded_session_exports_rows():
    """A base URL and a key for any client, a reward, and the rows; the session is forgotten with its block."""
    async with open_inference("tiny", CONFIG) as inference:
        async with inference.session("my-app") as session:
            async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
                answer = await client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "hello"}], max_tokens=4
                )
            await session.set_reward(0.5)
            await session.set_reward(1.0, interaction=answer.id)
            with pytest.raises(NotFound):
                await session.set_reward(1.0, interaction="chatcmpl-unknown")
            with pytest.raises(RewardError):
                await session.set_reward(float("nan"))
            episode = await session.export()
            again = await session.export(style="concat")
        with pytest.raises(NotFound):
            await inference.sessions.ask(CollectSession(session=session.id))

    assert session.id.startswith("my-app-")
    assert [(1.0, (answer.id,))] == [(row.reward, row.interactions) for row in episode.trajectories]
    assert episode.trajectories[0].input_ids.tolist() == again.trajectories[0].input_ids.tolist()
    assert session.api_key not in repr(session)


@pytest.mark.parametrize(
    ("name", "anyio_backend"),
    list(
        zip(
            ["open_inference", "rollouts", "session", "agent_session", "client", "system", "sqlite"],
            cycle(["asyncio", "trio"]),
            strict=False,
        )
    ),
)
async def test_public_contexts_raise_error_of_body(name, tmp_path):
    """As it is, in no exception group: ``except KeyError`` works around all of them."""
    async with open_inference("tiny", CONFIG) as inference:
        url, key = inference.endpoint.url, inference.endpoint.admin_key
        opening = {
            "open_inference": lambda: open_inference("tiny", CONFIG),
            "rollouts": inference.rollouts,
            "session": inference.session,
            "agent_session": lambda: AgentSession(base_url=url, api_key=key),
            "client": lambda: OpenAIProxyClient(url, admin_key=key, task_id="task"),
            "system": ActorSystem.open,
            "sqlite": lambda: SqliteJournal.open(tmp_path / "journal.sqlite"),
        }[name]
        with pytest.raises(KeyError, match="mine") as raised:
            async with opening():
                raise KeyError("mine")

    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None or raised.value.__suppress_context__


class Engines:
    """The protocol of an actor of the app."""


@frozen
class Break(Message[Engines, None]):
    """Crash."""


class Crashing(Actor[Engines]):
    """Raises the error of an engine when it is told to."""

    @Break.handler
    async def crash(self, message: Break) -> None:
        raise EngineError("the engine is lost")


@pytest.mark.parametrize("is_started", [False, True])
async def test_actor_crash_is_one_error(*, is_started):
    """``except ArealError`` catches it: it is in no exception group, whichever way the actors are opened."""
    opening = open_inference("tiny", CONFIG)
    with pytest.raises(EngineError, match="the engine is lost"), anyio.fail_after(60):
        if is_started:
            inference = await opening.start()
            await (await inference.system.spawn(Crashing())).tell(Break())
            await opening.aclose()
        else:
            async with opening as inference:
                await (await inference.system.spawn(Crashing())).tell(Break())
                await anyio.sleep_forever()


async def test_hanging_engine_ends_service(monkeypatch):
    """Within the time limit of a step: the app sees the error, and its requests do not wait forever."""
    is_over = threading.Event()
    monkeypatch.setattr(StepRunner, "launch", lambda *_: is_over.wait())
    config = evolve(CONFIG, engine=evolve(CONFIG.engine, step_timeout_seconds=0.2))
    try:
        with pytest.raises(EngineError, match=r"hangs in wait .*step_timeout_seconds"), anyio.fail_after(60):
            async with (
                open_inference("tiny", config) as inference,
                inference.session() as session,
                AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client,
            ):
                with suppress(OpenAIError):  # it is refused, or cut off
                    await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
                await anyio.sleep_forever()
    finally:
        is_over.set()


async def test_inference_leaves_no_thread_behind():
    """No engine thread outlives the block, also when it is cancelled."""
    with anyio.move_on_after(30) as scope:
        async with open_inference("tiny", CONFIG) as inference, inference.session():
            assert isinstance(inference.system, ActorSystem)
            scope.cancel()
            await anyio.sleep_forever()

    threads = [thread for thread in threading.enumerate() if thread.name.startswith("areal")]
    for thread in threads:
        thread.join(5)  # it has said that it ends, and may not have returned yet
    assert [] == [thread.name for thread in threads if thread.is_alive()]


async def test_missing_model_is_named():
    """Before anything was opened."""
    with pytest.raises(ModelError, match="tinny"):
        async with open_inference("tinny"):
            pass
