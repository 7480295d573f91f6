"""Stored answers of Responses: read, deleted, and referred to by the ids of their items."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from openai.types.responses import Response
from tests.proxy.stack import open_stack, sampled

from areal_actors.client import create_http_client
from areal_actors.domain import (
    Completion,
    FinishReason,
    Interaction,
    InteractionId,
    InteractionStatus,
)
from areal_actors.domain.chat import ChatMessage, ToolCall
from areal_actors.errors import InvalidRequest
from areal_actors.proxy.control import CONTEXT_NAMES
from areal_actors.proxy.dialects.responses.request import parse_input
from areal_actors.proxy.dialects.responses.stored import (
    find_references,
    format_stored_response,
    replace_references,
)


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: dialects do not depend on it."""
    return "asyncio"


QUESTION, FURTHER = ({"role": "user", "content": text} for text in ("one two", "and three"))


def stored(output: ChatMessage, *, name: str = "resp_7") -> Interaction:
    """A completed answer."""
    completion = Completion(
        token_ids=[1, 2], logprobs=[0, 0], raw_logprobs=[0, 0], versions=[0, 0], finish=FinishReason.STOP
    )
    return Interaction(
        id=InteractionId(name),
        order=0,
        prompt_suffix=[1],
        num_prompt_tokens=1,
        completion=completion,
        output=output,
        status=InteractionStatus.COMPLETED,
        completed_order=0,
    )


CALLS = (ToolCall(id="c1", name="f", arguments="{}"), ToolCall(id="c2", name="g", arguments='{"a":1}'))
RICH = ChatMessage(role="assistant", content="Let me see.", reasoning="Hm.", tool_calls=CALLS)
RESULTS = [{"type": "function_call_output", "call_id": name, "output": "42"} for name in ("c1", "c2")]


# ------------------------------------------------------------------------------------------------------- references


@pytest.mark.parametrize("has_type", [True, False])
def test_item_references_equal_items(has_type):
    """Reasoning, text and calls of one answer, by their ids, with and without the type of a reference."""
    answer = stored(RICH)
    items = format_stored_response(answer, model="m")["output"]
    kind = {"type": "item_reference"} if has_type else {}
    body = {"input": [QUESTION, *({"id": item["id"], **kind} for item in items), *RESULTS, FURTHER]}

    assert find_references(body) == {"resp_7"}
    replaced = replace_references(body, {InteractionId("resp_7"): answer})
    assert parse_input(replaced["input"]) == parse_input([QUESTION, *items, *RESULTS, FURTHER])
    assert parse_input(replaced["input"])[1] == RICH


def test_reference_to_split_text_adds_nothing():
    """The stored item has all of the text, so a reference to its second piece adds nothing."""
    references = [{"type": "item_reference", "id": f"msg_{index}_7"} for index in (0, 1)]
    body = replace_references({"input": [QUESTION, *references]}, {InteractionId("resp_7"): stored(RICH)})

    assert [message.content for message in parse_input(body["input"])] == ["one two", "Let me see."]


@pytest.mark.parametrize("name", ["fc_2_7", "rs_0_8", "x", 7, None])
def test_unknown_item_reference_is_refused(name):
    """An item that the answer does not have, that of another answer, and what is not an id."""
    body = {"input": [QUESTION, {"type": "item_reference", "id": name}]}

    with pytest.raises(InvalidRequest, match=r"input\[1\] refers to item"):
        replace_references(body, {InteractionId("resp_7"): stored(RICH)})


def test_body_without_references_is_unchanged():
    """Nothing is looked up for them, whatever their input is."""
    for value in (None, "text", 3, [], [3, "x", {"type": "message"}], [QUESTION]):
        assert find_references({"input": value}) == frozenset()


@pytest.mark.anyio
async def test_referenced_conversation_is_linked():
    """Same parent and same tokens; a reference to an answer of another session is refused before anything is stored."""
    answers = map(sampled, ("first", "second", "second"))
    async with open_stack(*answers) as stack, create_http_client() as http:
        session = stack.session
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http, max_retries=0)
        first = await client.responses.create(model="m", input=[QUESTION])
        (item,) = first.output
        reference = {"type": "item_reference", "id": item.id}
        by_reference = await client.responses.create(model="m", input=[QUESTION, reference, FURTHER])
        by_item = await client.responses.create(model="m", input=[QUESTION, item.to_dict(), FURTHER])
        with pytest.raises(openai.BadRequestError, match="not an answer of this session"):
            other = {"type": "item_reference", "id": "msg_0_other"}
            await client.responses.create(model="m", input=[QUESTION, other, FURTHER])
        turns = await stack.record()

    assert [turn.parent for turn in turns] == [None, first.id, first.id]
    assert [turn.token_parent for turn in turns] == [None, first.id, first.id]
    assert by_reference.usage.input_tokens == by_item.usage.input_tokens
    assert (turns[1].prompt_suffix == turns[2].prompt_suffix).all()


# ----------------------------------------------------------------------------------------------------------- routes


@pytest.mark.anyio
async def test_stored_response_is_read():
    """As it was given; one that there is not is not found."""
    async with open_stack(sampled("first")) as stack, create_http_client() as http:
        session = stack.session
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http, max_retries=0)
        given = await client.responses.create(model="m", input=[QUESTION], temperature=0.5)
        read = await client.responses.retrieve(given.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_x")

    assert read.output == given.output
    assert (read.usage.total_tokens, read.temperature) == (given.usage.total_tokens, 0.5)


@pytest.mark.anyio
async def test_stored_response_is_hidden_from_other_sessions():
    """Ids are not secrets: a session's key opens its own answers only."""
    async with open_stack(sampled("first")) as stack, create_http_client() as http:
        given = await http.post(f"{stack.session.base_url}/responses", json={"input": "hi"})
        root = stack.session.base_url.removesuffix(f"/{stack.session.session_id}/v1")
        path = f"{root}/v1/responses/{given.json()['id']}"
        keys = {"completion": stack.session.completion_key, "wrong": "sk-other"}
        found = {name: await http.get(path, headers={"x-api-key": key}) for name, key in keys.items()}
        without = await http.get(path)

    assert (found["completion"].status_code, found["wrong"].status_code, without.status_code) == (200, 401, 401)


@pytest.mark.anyio
async def test_model_is_described_by_any_name():
    """The policy answers requests for any model, and so is found under any name."""
    async with open_stack() as stack, create_http_client() as http:
        session = stack.session
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http, max_retries=0)
        listed = (await client.models.list()).data
        found = [await client.models.retrieve(name) for name in (listed[0].id, "gpt-5")]

    assert found[0] == listed[0]
    assert (found[1].id, found[1].owned_by) == ("gpt-5", listed[0].owned_by)


@pytest.mark.anyio
async def test_model_reports_its_context_length():
    """Under the names that clients of other servers read. A model's name may have a slash."""
    async with open_stack() as stack, create_http_client() as http:
        session = stack.session
        openai_client = openai.AsyncOpenAI(base_url=session.base_url, api_key="k", http_client=http, max_retries=0)
        found = (await openai_client.models.retrieve("Qwen/Qwen3-0.6B")).to_dict()
        async with anthropic.AsyncAnthropic(base_url=session.base_url.removesuffix("/v1"), api_key="k") as client:
            (listed,) = (await client.models.list()).data
        length = stack.engine.info.context_length

    assert found["id"] == "Qwen/Qwen3-0.6B"
    assert {found[name] for name in CONTEXT_NAMES} == {length}
    assert (listed.type, listed.max_input_tokens, listed.created_at.tzinfo is None) == ("model", length, False)


REQUIRED = {
    *(name for name, each in Response.model_fields.items() if each.is_required()),
    # The schema of OpenResponses requires these as well.
    *("completed_at", "status", "incomplete_details", "previous_response_id", "instructions", "error", "truncation"),
    *("text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}


@pytest.mark.anyio
async def test_stored_response_has_all_keys():
    """Created, in each event of a stream that has one, and retrieved; what was asked is repeated."""
    asked = {
        "input": "hi",
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "user": "u",
        "temperature": 0.5,
    }
    async with open_stack(sampled("first"), sampled("second")) as stack, create_http_client() as http:
        url = f"{stack.session.base_url}/responses"
        created = (await http.post(url, json=asked)).json()
        streamed = (await http.post(url, json=asked | {"stream": True})).text
        retrieved = (await http.get(f"{url}/{created['id']}")).json()
    events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: ")]
    objects = [created, retrieved, *(event["response"] for event in events if "response" in event)]

    assert len(objects) == 5
    for each in objects:
        assert set(each) >= REQUIRED
        assert set(each) == set(created)
        Response.model_validate(each, strict=True)
        for name in ("presence_penalty", "frequency_penalty"):
            assert isinstance(each[name], float)
    for each in (created, *objects[2:]):
        assert {name: each[name] for name in asked if name != "input"} == {
            k: v for k, v in asked.items() if k != "input"
        }
