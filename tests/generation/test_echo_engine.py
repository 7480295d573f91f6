"""``EchoEngine``: tests hold it by the token."""

from __future__ import annotations

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from areal_actors.domain import FinishReason
from areal_actors.errors import EngineError
from areal_actors.testing.engines import EchoEngine, script_answers
from areal_actors_testing.engine_contract import collect, join_ids

pytestmark = pytest.mark.anyio


async def test_echo_engine_repeats_its_prompt(create_request):
    """Without a script the prompt comes back, and ends with STOP."""
    chunks = await collect(EchoEngine(), create_request(0, [5, 6, 7]))

    assert join_ids(chunks) == [5, 6, 7]
    assert chunks[-1].finish is FinishReason.STOP


async def test_answers_come_in_order(create_request):
    """Each request gets the next answer; the last serves all further ones."""
    engine = EchoEngine(script_answers([1], [2, 3]))
    answers = [join_ids(await collect(engine, create_request(i, [9]))) for i in range(3)]

    assert answers == [[1], [2, 3], [2, 3]]
    assert [request.id for request in engine.requests] == ["0", "1", "2"]


async def test_gate_releases_single_tokens(create_request):
    """A gated engine samples exactly as many tokens as were released."""
    engine = EchoEngine(is_gated=True)
    seen = []

    async def consume() -> None:
        seen.extend([chunk async for chunk in chunks])

    async with anyio.create_task_group() as tasks, engine.generate(create_request(0, [5, 6, 7])) as chunks:
        tasks.start_soon(consume)
        await wait_all_tasks_blocked()
        assert engine.statistics().sampled_tokens == 0
        engine.release(2)
        await wait_all_tasks_blocked()
        assert engine.statistics().sampled_tokens == 2
        engine.release()
        while not seen:
            await checkpoint()

    assert join_ids(seen) == [5, 6, 7]


async def test_failure_reaches_waiting_consumers(create_request):
    """``fail`` raises in a waiting consumer and in every later call, with the cause."""
    engine = EchoEngine(is_gated=True)
    async with anyio.create_task_group() as tasks:

        async def expect_failure() -> None:
            with pytest.raises(EngineError, match="power"):
                await collect(engine, create_request(0, [5]))

        tasks.start_soon(expect_failure)
        await wait_all_tasks_blocked()
        engine.fail(OSError("no power"))
    with pytest.raises(EngineError):
        await engine.pause()
