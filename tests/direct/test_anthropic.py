"""``ArealAnthropic``: Anthropic's SDK on an engine in this process."""

from __future__ import annotations

import pytest
from tests.stacks.inference_stack import encode, renderer

from areal_actors.direct.anthropic import ArealAnthropic
from areal_actors.testing.engines import EchoEngine, script_answers

pytestmark = [
    pytest.mark.anyio,
    # trio speaks of generators that the SDK leaves behind at the end of its streams
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2|anthropic):ResourceWarning"),
]

QUESTION = {"role": "user", "content": "one plus one?"}


async def test_conversation_is_rewarded_and_exported():
    """Two turns, one of them streamed, become one trajectory of exact tokens; the reward reaches the first."""
    engine = EchoEngine(script_answers(encode("two"), encode("four")))
    async with ArealAnthropic(engine=engine, tokenizer=renderer()) as client:
        first = await client.messages.create(model="default", max_tokens=9, messages=[QUESTION])
        history = [QUESTION, {"role": "assistant", "content": first.content}, QUESTION]
        count = await client.messages.count_tokens(model="default", messages=history)
        async with client.messages.stream(model="default", max_tokens=9, messages=history) as stream:
            second = await stream.get_final_message()
        client.set_last_reward(1.0)
        client.apply_reward_discount(turn_discount=0.9)
        rewards = [client.get_interaction(answer.id).reward for answer in (first, second)]
        rows = client.export_interactions(style="concat")

    assert [answer.content[0].text for answer in (first, second)] == ["two", "four"]
    assert rewards == pytest.approx([0.9, 1.0])
    assert count.input_tokens == second.usage.input_tokens
    assert engine.requests[1].prompt.tolist()[: len(engine.requests[0].prompt) + 1][-1] == encode("two")[0]
    assert len(rows) == 1
