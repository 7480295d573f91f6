"""Histories that agents make of our own answers: each is answered, and credits the answers that it continues."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import pytest
from tests.stacks.family_stack import open_family_stack

from areal_actors_testing.families import FAMILIES

pytestmark = pytest.mark.anyio
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: dialects do not depend on it."""
    return "asyncio"


def say(text: str, role: str = "user") -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": text}


def written(argument: str, call_id: str = "abcDEF123") -> str:
    """A call as a Mistral model writes it, with an id."""
    call = {"name": "f", "arguments": {"a": argument}, "id": call_id}
    return f"[TOOL_CALLS]{json.dumps([call])}"


def read_stream(text: str) -> dict[str, Any]:
    """The answer in the chunks of a chat completion."""
    calls: list[dict[str, Any]] = []
    name = ""
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        name = chunk["id"]
        for call in (call for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or ()):
            if call.get("id"):
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"id": name, "message": {"role": "assistant", "content": None, "tool_calls": calls}}


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_repeated_call_id_credits_the_continued_conversation(*, is_streaming: bool) -> None:
    """The client edits its echo, so that only the id of the call tells whose answer it is."""
    async with open_family_stack("mistral-v3", [written("one"), written("two"), "done"]) as stack:

        async def ask(*messages: dict[str, Any]) -> dict[str, Any]:
            body = {"messages": list(messages), "tools": TOOLS, "stream": is_streaming}
            answer = await stack.post("chat/completions", body)
            if is_streaming:
                return read_stream(answer.text)
            return {"id": answer.json()["id"], "message": answer.json()["choices"][0]["message"]}

        first, second = await ask(say("task one")), await ask(say("task two"))
        (call,) = first["message"]["tool_calls"]
        call["function"]["arguments"] = '{"a": "one", "b": false}'
        result = {"role": "tool", "tool_call_id": call["id"], "content": "r1"}
        last = await ask(say("task one"), first["message"], result)
        await stack.session.set_reward(last["id"], 1.0)
        returns = await stack.returns(discount=0.5)

    assert second["message"]["tool_calls"][0]["id"] != call["id"]
    assert (returns[first["id"]], returns[second["id"]]) == (0.5, 0.0)


async def test_call_ids_are_unique_in_an_answer() -> None:
    """Clients tell calls apart by their ids, and prompts show what the model wrote."""
    twice = written("one").removesuffix("]") + ", " + written("two").removeprefix("[TOOL_CALLS][")
    async with open_family_stack("mistral-v3", [twice]) as stack:
        body: dict[str, Any] = {"messages": [say("task")], "tools": TOOLS, "n": 3}
        choices = (await stack.post("chat/completions", body)).json()["choices"]
        ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
        results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in ids[-2:]]
        body["messages"] += [choices[-1]["message"], *results]
        answer = await stack.post("chat/completions", body)

    assert len(set(ids)) == 6
    assert answer.status_code == 200
    assert stack.prompts[-1].count('"call_id": "abcDEF123"') == 2


@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_messages_agent_continues_after_odd_samples(family: str) -> None:
    """Two calls with a text, results with a reminder behind them, a late system message, and a lone system message."""
    writer = FAMILIES[family]
    answers = [writer.write("hm", [("f", {"a": "1"}), ("f", {"a": "2"})], "so" if writer.thought else ""), "fine"]
    function = {"name": "f", "input_schema": FUNCTION["parameters"]}
    body: dict[str, Any] = {"messages": [say("task"), say("agents: a, b", "system")], "tools": [function]}
    body |= {"system": "Be brief.", "max_tokens": 400}
    said = ["task", "agents: a, b", "Be brief."]
    async with open_family_stack(family, answers) as stack:
        for number in range(3):
            answer = await stack.post("messages", body)

            assert (answer.status_code, number) == (200, number), answer.text
            assert all(text in stack.prompts[-1] for text in said)
            content = answer.json()["content"]
            calls = [block["id"] for block in content if block["type"] == "tool_use"]
            new = [{"type": "tool_result", "tool_use_id": name, "content": f"r{number}{name[-4:]}"} for name in calls]
            new.append({"type": "text", "text": f"reminder {number}"})
            said += [f"reminder {number}", *(block["content"] for block in new[:-1])]
            body["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": new}]
        alone = await stack.post("messages", {"messages": [say("Print the date.", "system")], "max_tokens": 9})

    assert alone.status_code == 200
    assert "Print the date." in stack.prompts[-1]


# ------------------------------------------------------------------------------- answers that the client begins


@pytest.mark.parametrize(("family", "is_streaming"), list(zip(sorted(FAMILIES), cycle([False, True]))))
async def test_begun_answer_is_continued(family: str, *, is_streaming: bool) -> None:
    """The client gets the rest; what it sends back is the whole answer, whose exact tokens the next prompt extends."""
    begun = {"role": "assistant", "content": "The answer <|im_end|> is "}
    asked = {"messages": [say("task"), begun], "max_tokens": 400, "stream": is_streaming}
    async with open_family_stack(family, ["42."]) as stack:
        answer = await stack.post("messages", asked)
        if is_streaming:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            said = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
        else:
            said = "".join(block["text"] for block in answer.json()["content"])
        whole = {"role": "assistant", "content": begun["content"] + said}
        await stack.post("messages", {"messages": [say("task"), whole, say("sure?")], "max_tokens": 400})
        record = await stack.record()
        first, second = stack.prompts

    assert said == "42."
    assert first.endswith("The answer <|im_end|> is ")
    assert record.interactions[0].output.content == whole["content"]
    assert record.interactions[1].parent == record.interactions[0].id
    assert "The answer <|im_end|> is 42." in second


async def test_begun_answer_in_a_wrong_place_is_refused() -> None:
    """Where a template joins it with the answer before it; nothing is sampled."""
    begun = {"role": "assistant", "content": "The answer is "}
    async with open_family_stack("gemma-3", ["42."]) as stack:
        joined = await stack.post("messages", {"messages": [say("task"), begun, begun], "max_tokens": 9})
        assert stack.prompts == []

    assert joined.status_code == 400
    assert "does not let an answer begin after the assistant message" in joined.text


async def test_continue_final_message_continues_the_last_answer() -> None:
    """Otherwise it is a finished turn, as OpenAI has it; Responses have no such field."""
    begun = {"role": "assistant", "content": "The answer is "}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    async with open_family_stack("qwen2.5", ["42."]) as stack:
        body = {"messages": [say("task"), begun]}
        continued = await stack.post("chat/completions", body | more)
        fresh = await stack.post("chat/completions", body)
        response = await stack.post("responses", {"input": body["messages"]})
        prompts = stack.prompts

    assert continued.json()["choices"][0]["message"]["content"] == "42."
    assert [answer.status_code for answer in (fresh, response)] == [200, 200]
    assert [prompt.endswith("The answer is ") for prompt in prompts] == [True, False, False]
    assert all("The answer is " in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [say("task")], "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
async def test_answer_that_cannot_be_continued_is_refused(fields: dict[str, Any], param: str) -> None:
    """Before anything is sampled."""
    body = {"messages": [say("task"), {"role": "assistant", "content": "The answer is"}]}
    async with open_family_stack("qwen2.5", ["42."]) as stack:
        answer = await stack.post("chat/completions", body | fields)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stack.prompts == []
