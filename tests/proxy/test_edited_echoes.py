"""Clients that edit their echoes, in front of the real sessions: each turn of a rewarded episode returns its reward."""

from __future__ import annotations

import json

import anthropic
import httpx
import httpx2
import pytest
from tests.proxy.stack import open_stack, sampled

from areal_actors.domain import ForkReason

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: dialects do not depend on it."""
    return "asyncio"


TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("Write", "Read", "Edit")]
EDITED = ForkReason.CLIENT_EDITED_HISTORY


def _call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _sampled_by_row(trajectories):
    """The trained tokens of each turn, by its id."""
    return {row.interactions[-1]: row.input_ids[row.loss_mask == 1].tolist() for row in trajectories}


async def test_default_added_by_claude_code_keeps_the_chain():
    """Write, Read, five edits whose echoes gain ``replace_all: false``, "All done.": eight turns return 1.0."""
    edits = [_call("Edit", file_path="a.py", old_string=f"{n}", new_string=f"{n + 1}") for n in range(5)]
    answers = [_call("Write", file_path="a.py", content="0"), _call("Read", file_path="a.py"), *edits, "All done."]
    async with open_stack(*map(sampled, answers)) as stack, httpx2.AsyncClient() as http:
        base_url = stack.session.base_url.removesuffix("/v1")
        client = anthropic.AsyncAnthropic(base_url=base_url, api_key=stack.session.api_key, http_client=http)
        history = [{"role": "user", "content": "Count to five."}]
        while True:
            answer = await client.messages.create(model="m", max_tokens=256, messages=history, tools=TOOLS)
            blocks = [block.model_dump() for block in answer.content]
            calls = [block for block in blocks if block["type"] == "tool_use"]
            for call in calls:
                if call["name"] == "Edit":
                    call["input"] |= {"replace_all": False}
            if not calls:
                break
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"} for call in calls]
            history += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        await stack.session.set_reward(answer.id, 1.0)
        await stack.session.end_session()
        turns = await stack.record()
        rows = (await stack.session.export_episode(discount=1.0, style="individual")).trajectories

    assert [turn.fork for turn in turns] == [ForkReason.ROOT, None, None, *[EDITED] * 5]
    assert [turn.parent for turn in turns] == [None, *(turn.id for turn in turns[:-1])]
    # Edited calls are rendered again; the tokens up to the last faithful echo, that of Read, are still the exact ones.
    assert {turn.token_parent for turn in turns[2:]} == {turns[1].id}
    assert [row.reward for row in rows] == [1.0] * 8
    assert list(_sampled_by_row(rows).values()) == [sampled(text) for text in answers]


async def test_stop_string_restored_by_a_code_agent_keeps_the_chain():
    """Smolagents adds the end of the code and its own call to the text: the last answer's reward reaches the first."""
    codes = ["Thought: add.\n<code>\nprint(1 + 1)\n", "Thought: I know.\n<code>\nfinal_answer(2)\n"]
    async with open_stack(*map(sampled, codes)) as stack, httpx.AsyncClient() as http:
        history = [{"role": "system", "content": "Write code."}, {"role": "user", "content": "New task:\n1 + 1?"}]
        for _ in codes:
            body = {"messages": history, "model": "m", "max_tokens": 64, "stop": ["Observation:", "Calling tools:"]}
            response = await http.post(
                f"{stack.session.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {stack.session.api_key}"},
                json=body,
            )
            answer = response.raise_for_status().json()
            text = answer["choices"][0]["message"]["content"] + "</code>"
            call = {"name": "python_interpreter", "arguments": text}
            called = [{"id": "call_1", "type": "function", "function": call}]
            parts = [{"type": "text", "text": f"{text}Calling tools:\n{called}"}]
            history += [{"role": "assistant", "content": parts}, {"role": "user", "content": "Observation:\n2"}]
        await stack.session.set_reward(answer["id"], 1.0)
        await stack.session.end_session()
        turns = await stack.record()
        rows = (await stack.session.export_episode(discount=1.0, style="individual")).trajectories

    assert [(turn.parent, turn.fork) for turn in turns] == [(None, ForkReason.ROOT), (turns[0].id, EDITED)]
    assert [row.reward for row in rows] == [1.0, 1.0]
    assert list(_sampled_by_row(rows).values()) == [sampled(text) for text in codes]
