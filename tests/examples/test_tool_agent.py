"""The agent of the default job: what each kind of answer earns."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import httpx
import pytest

from areal_actors.workflows import resolve_agent, run_agent
from areal_actors.workflows.agents import Injected

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_agent.py"
PROBLEM = {"question": "A box holds 120 pens. How many pens are in 300 boxes?", "a": 120, "b": 300}


def calling(arguments, *, name="multiply"):
    """An assistant message with one call."""
    function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def saying(text):
    """An assistant message of text."""
    return {"role": "assistant", "content": text}


RIGHT = calling({"a": 120, "b": 300})


def reward_for(*answers):
    """What an episode earns in which the model gives these answers, and the requests it was sent."""
    requests = []

    def respond(request: httpx.Request) -> httpx.Response:
        message = answers[len(requests)]
        requests.append(json.loads(request.content))
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return httpx.Response(200, json=body)

    async def main():
        agent = resolve_agent(f"{EXAMPLE}:ToolAgent")
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
            injected = Injected(base_url="http://model/v1", api_key="key", http_client=client)
            return await run_agent(agent, PROBLEM, injected)

    return anyio.run(main).last, requests


@pytest.mark.parametrize(
    ("reward", "answers"),
    [
        (0.0, [saying("Thirty-six thousand.")]),
        (0.0, [saying(None)]),
        (0.1, [saying('<tool_call>\n{"name": "multiply", "argum')]),
        (0.1, [calling("{120, 300")]),
        (0.1, [calling("[120, 300]")]),
        (0.1, [calling({"a": 120})]),
        (0.1, [calling({"a": 120, "b": 301})]),
        (0.1, [calling({"a": 120, "b": 300}, name="add")]),
        (0.1, [calling({"a": 120, "b": 300}) | {"tool_calls": RIGHT["tool_calls"] * 2}]),
        (0.3, [RIGHT, saying("The answer is 37.")]),
        (0.3, [RIGHT, saying(None)]),
        (0.3, [RIGHT, saying("The answer is 360001.")]),
        (0.5, [RIGHT, saying("There are 36000 pens.")]),
        (1.0, [RIGHT, saying("The answer is 36000.")]),
        (1.0, [calling({"a": 300, "b": 120}), saying("The answer is 36000.\n")]),
    ],
)
def test_rewards(reward, answers):
    """No call, a malformed or wrong one, a right one, an answer with the result, the answer that was shown."""
    earned, requests = reward_for(*answers)

    assert reward == earned
    assert len(answers) == len(requests)


def test_the_second_turn_continues_the_first():
    """The call is sent back as it was given, followed by its result: the same conversation, two messages longer."""
    _, (first, second) = reward_for(RIGHT, saying("The answer is 36000."))

    assert first["messages"] == second["messages"][: len(first["messages"])]
    assert ["assistant", "tool"] == [message["role"] for message in second["messages"][len(first["messages"]) :]]
    assert "36000" == second["messages"][-1]["content"]
    assert first["tools"] == second["tools"]
