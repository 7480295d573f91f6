"""Long prompts are tokenised in a thread, in real time."""

from __future__ import annotations

from itertools import count

import anyio
import pytest
from tests.stacks.callers import NAMED, WAYS, Caller, turns
from tests.stacks.inference_stack import open_inference_stack, renderer, say

pytestmark = pytest.mark.anyio
_numbers = count()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: a virtual clock would not wait for the thread."""
    return request.param


@pytest.mark.parametrize("first_way", WAYS)
@pytest.mark.parametrize("way", WAYS)
async def test_retry_during_the_encoding_of_a_long_prompt_joins_it(first_way: str, way: str):
    """The prompt is sampled once."""
    long = say(f"{next(_numbers)} why? " * 3500)  # one that was seen before would not be tokenised
    async with open_inference_stack() as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        short = Caller(inference, session, "complete", None)
        callers = [Caller(inference, session, each, NAMED, messages=long) for each in (first_way, way)]
        for caller in (*callers, short):
            tasks.start_soon(caller)
        await short.done.wait()
        before = await turns(inference, session)
        for caller in callers:
            await caller.done.wait()
        known = await turns(inference, session)

    assert short.answers
    assert [turn.id for turn in before][:1] == short.ids
    assert [None, None] == [caller.error for caller in callers]
    assert callers[0].ids == callers[1].ids
    assert 2 == len(known) == len(inference.engine.requests)
    assert renderer().render(long).tolist() == list(inference.engine.requests[-1].prompt)
