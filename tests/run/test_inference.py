"""Somebody's own app opens the actors inside its own loop: sessions, rewards, rows, and an end without leftovers."""

from __future__ import annotations

import threading

import anyio
import pytest
from openai import AsyncOpenAI

from areal_actors.errors import ModelError, NotFound, RewardError
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.kernel import ActorSystem
from areal_actors.messages import CollectSession
from areal_actors.run import open_inference
from areal_actors.run.inference import InferenceConfig

pytestmark = pytest.mark.anyio

CONFIG = InferenceConfig(engine=TorchEngineConfig(dtype="float32", max_concurrent=4, max_length=256))


async def test_an_app_gets_its_rows():
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
                await session.set_reward(1.0, interaction="chatcmpl-nobody")
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


async def test_a_block_that_raises_raises_its_own_error():
    """Whatever has stopped in the meantime: the first error is what the app sees."""
    with pytest.raises(KeyError, match="mine"):
        async with open_inference("tiny", CONFIG) as inference, inference.session():
            await inference.sessions.stop()
            raise KeyError("mine")


async def test_nothing_is_left_behind():
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


async def test_a_model_that_is_not_there_is_named():
    """Before anything was opened."""
    with pytest.raises(ModelError, match="tinny"):
        async with open_inference("tinny"):
            pass
