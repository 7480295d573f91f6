"""Odd answers of a model reach every client as the same, strict JSON, streamed or not; only the engine is scripted."""

from __future__ import annotations

import json
from itertools import chain

import httpx
import orjson
import pytest
from tests.proxy.stack import open_stack

from areal_actors_testing.families import FAMILIES

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: dialects do not depend on it."""
    return "asyncio"


QUESTION = {"role": "user", "content": "hi"}
LONG = 98765432109876543210
SCHEMA = {"type": "object", "properties": {"id": {"enum": [LONG, -LONG, 1.5]}}}
BODIES = {
    "chat/completions": {
        "messages": [QUESTION],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    "responses": {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    "messages": {"messages": [QUESTION], "max_tokens": 512, "tools": [{"name": "f", "input_schema": SCHEMA}]},
}
every_route = pytest.mark.parametrize("route", BODIES)


def sample(text, family="qwen3"):
    return FAMILIES[family].sample(text)


def model(family="qwen3"):
    return FAMILIES[family].create_renderer()


async def post(http, stack, route, body):
    answer = await http.post(f"{stack.session.base_url}/{route}", content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return answer


async def stream(http, stack, route, body):
    answer = await post(http, stack, route, body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
    return [orjson.loads(line) for line in lines]


def strict(text):
    """The value of JSON for the strictest reader, with exact integers."""
    orjson.loads(text)
    return json.loads(text)


def read(route, document):
    """Thinking, text and calls of an answer without a stream."""
    if route == "chat/completions":
        message = document["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return (
            message.get("reasoning_content", ""),
            message["content"] or "",
            [(call["name"], strict(call["arguments"])) for call in calls],
        )
    items = document["output"] if route == "responses" else document["content"]
    texts = {"thinking": "", "text": ""}
    calls = []
    for item in items:
        match item["type"]:
            case "reasoning" | "message":
                texts["thinking" if item["type"] == "reasoning" else "text"] += item["content"][0]["text"]
            case "function_call":
                calls.append((item["name"], strict(item["arguments"])))
            case "tool_use":
                calls.append((item["name"], item["input"]))
            case kind:
                texts[kind] += item[kind]
    return texts["thinking"], texts["text"], calls


def read_stream(route, events):
    """The same of a stream, joined from its deltas as clients do it."""
    texts, calls = {"thinking": "", "text": ""}, []
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            texts["thinking"] += delta.get("reasoning_content") or ""
            texts["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"]["arguments"]
        match event.get("type", "").removeprefix("response."):
            case "output_item.added" if event["item"]["type"] == "function_call":
                calls.append([event["item"]["name"], ""])
            case "function_call_arguments.delta":
                calls[-1][1] += event["delta"]
            case "reasoning_text.delta" | "output_text.delta" as kind:
                texts["thinking" if "reasoning" in kind else "text"] += event["delta"]
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                calls.append([event["content_block"]["name"], ""])
            case "content_block_delta":
                delta = event["delta"]
                if "partial_json" in delta:
                    calls[-1][1] += delta["partial_json"]
                for kind in texts:
                    texts[kind] += delta.get(kind, "")
    return texts["thinking"], texts["text"], [(name, strict(written)) for name, written in calls]


async def both(stack, route, body):
    """What a client reads of two equal answers, without and with a stream."""
    async with httpx.AsyncClient() as http:
        whole = (await post(http, stack, route, body)).json()
        return read(route, whole), read_stream(route, await stream(http, stack, route, body))


def call(arguments, key="arguments"):
    return f'<tool_call>\n{{"name": "f", "{key}": {arguments}}}\n</tool_call>'


@every_route
@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (r'{"a": "x\ud83dy"}', {"a": "x\ufffdy"}),
        (r'{"\ude00": ["\ud83d\ud83d\ude00"]}', {"\ufffd": ["\ufffd😀"]}),
        (json.dumps('{"a": "\ud83d"}', ensure_ascii=False).replace("\ud83d", r"\ud83d"), {"a": "\ufffd"}),
        (json.dumps(r'{"a": "\ud83d"}'), {"a": "\ufffd"}),
        (f'{{"id": {LONG}, "n": [-{LONG}, 1.0, 1e300, -0.5]}}', {"id": LONG, "n": [-LONG, 1.0, 1e300, -0.5]}),
        ('{"k": 1, "k": 2}', {"k": 2}),
        ("{}", {}),
    ],
)
async def test_odd_arguments_are_the_same_on_every_route(route, arguments, value):
    """Half of a surrogate pair is replaced, numbers keep their values, and every stream is strict JSON."""
    async with open_stack(sample(call(arguments)), sample(call(arguments)), model=model()) as stack:
        whole, streamed = await both(stack, route, BODIES[route])

    assert whole == streamed == ("", "", [("f", value)])


@every_route
async def test_arguments_under_another_key_are_parsed(route):
    """A call is never made without the arguments that were written."""
    answer = sample(call('{"a": "x"}', key="parameters"))
    async with open_stack(answer, answer, model=model()) as stack:
        whole, streamed = await both(stack, route, BODIES[route])

    assert whole == streamed == ("", "", [("f", {"a": "x"})])


@every_route
async def test_long_integers_reach_the_prompt(route):
    """In schemas and in the arguments of calls, as text and as objects; an echo of the answer has them as well."""
    answer = sample(call(f'{{"id": {LONG}}}'))
    async with open_stack(answer, sample("done"), model=model()) as stack, httpx.AsyncClient() as http:
        body = BODIES[route]
        document = (await post(http, stack, route, body)).json()
        if route == "responses":
            (made,) = document["output"]
            result = {"type": "function_call_output", "call_id": made["call_id"], "output": "ok"}
            further = {"input": [QUESTION, made, result, {"role": "user", "content": "and?"}]}
            echoed = document["tools"][0]["parameters"]["properties"]["id"]["enum"]
        elif route == "messages":
            made = document["content"][-1]
            result = {"type": "tool_result", "tool_use_id": made["id"], "content": "ok"}
            content = [result, {"type": "text", "text": "and?"}]
            said = [{"role": "assistant", "content": [made]}, {"role": "user", "content": content}]
            further = {"messages": [QUESTION, *said]}
            echoed = [LONG, -LONG, 1.5]
        else:
            made = document["choices"][0]["message"]
            made["tool_calls"][0]["function"]["arguments"] = {"id": LONG}
            result = {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "ok"}
            further = {"messages": [QUESTION, made, result, {"role": "user", "content": "and?"}]}
            echoed = [LONG, -LONG, 1.5]
        await post(http, stack, route, body | further)
        first, second = (stack.engine.requests[index].prompt.tolist() for index in (0, 1))

    assert f"[{LONG}, -{LONG}, 1.5]" in model().decode(first)
    assert f'"id": {LONG}' in model().decode(second)
    assert echoed == [LONG, -LONG, 1.5]


# ----------------------------------------------------------------------------------------------------- stop strings

THOUGHTS = {
    "qwen3": "<think>\nnever STOP here\n</think>\n\nThe end. STOP and more",
    "magistral": "[THINK]never STOP here[/THINK]The end. STOP and more",
    "gpt-oss": "<|channel|>analysis<|message|>never STOP here<|end|><|start|>assistant"
    "<|channel|>final<|message|>The end. STOP and more",
}


@every_route
@pytest.mark.parametrize("family", THOUGHTS)
async def test_stop_string_in_thinking_is_ignored(route, family):
    """The answer ends at the first one after it, and sampling with the token that completes it."""
    answer = sample(THOUGHTS[family], family)
    body = BODIES[route] | {"stop_sequences" if route == "messages" else "stop": ["STOP"]}
    async with open_stack(answer, answer, model=model(family)) as stack:
        whole, streamed = await both(stack, route, body)
        turns = await stack.record()

    assert whole == streamed == ("never STOP here", "The end. ", [])
    assert [request.sampling.stop for request in stack.engine.requests] == [()] * 2
    for turn in turns:
        assert turn.completion.finish == "stop"
        assert model(family).decode(turn.completion.token_ids).endswith("The end. STOP")
        assert turn.completion.token_ids.tolist() == answer[: len(turn.completion.token_ids)]


async def test_stop_string_at_the_end_of_thinking_is_ignored():
    """Also where the stop string goes on after the thinking."""
    answer = sample("<think>\nST\n</think>\n\nOP it. STOP")
    async with open_stack(answer, answer, model=model()) as stack:
        whole, streamed = await both(stack, "chat/completions", BODIES["chat/completions"] | {"stop": ["STOP", "T\n"]})

    assert whole == streamed == ("ST", "OP it. ", [])


async def test_raw_text_is_stopped_by_the_engine():
    """It has no thinking."""
    async with open_stack(sample("a STOP b"), model=model()) as stack, httpx.AsyncClient() as http:
        document = (await post(http, stack, "completions", {"prompt": "x", "stop": ["STOP"], "max_tokens": 99})).json()

    assert document["choices"][0]["text"] == "a "
    assert stack.engine.requests[0].sampling.stop == ("STOP",)


# ------------------------------------------------------------------------------------- log-probabilities and usage

CHARACTERS = "a🙂é b"


def bytes_of(entries):
    return bytes(chain.from_iterable(entry["bytes"] for entry in entries)).decode()


async def test_logprob_bytes_join_to_the_text():
    """In chat completions and Responses, streamed and not, although each character is several tokens."""
    answers = [sample(CHARACTERS)] * 4
    chat = {"messages": [QUESTION], "logprobs": True, "top_logprobs": 1}
    response = {"input": "hi", "include": ["message.output_text.logprobs"]}
    async with open_stack(*answers, model=model()) as stack, httpx.AsyncClient() as http:
        one = (await post(http, stack, "chat/completions", chat)).json()["choices"][0]["logprobs"]["content"]
        chunks = await stream(http, stack, "chat/completions", chat)
        two = (await post(http, stack, "responses", response)).json()["output"][0]["content"][0]["logprobs"]
        events = await stream(http, stack, "responses", response)
    three = [entry for e in chunks for c in e["choices"] for entry in (c.get("logprobs") or {"content": ()})["content"]]
    four = events[-1]["response"]["output"][0]["content"][0]["logprobs"]

    for entries in (one, two, three, four):
        assert bytes_of(entries) == CHARACTERS + "<|im_end|>"
    assert bytes_of([entry["top_logprobs"][0] for entry in one]) == CHARACTERS + "<|im_end|>"
    assert [entry["token"] for entry in one] == [entry["token"] for entry in three]


async def test_completion_offsets_match_the_text():
    """Tokens of one character begin where it begins, and each has an entry of its own."""
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 99}
    async with open_stack(sample(CHARACTERS), sample(CHARACTERS), model=model()) as stack, httpx.AsyncClient() as http:
        choice = (await post(http, stack, "completions", body)).json()["choices"][0]
        chunks = [event["choices"][0]["logprobs"] for event in await stream(http, stack, "completions", body)]
    logprobs = choice["logprobs"]
    tokens = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))

    assert tokens[:5] == [("a", 0), (r"bytes:\xf0", 1), (r"bytes:\x9f", 1), (r"bytes:\x99", 1), (r"bytes:\x82", 1)]
    assert tokens[-3:-1] == [(" ", 3), ("b", 4)]
    assert [[token] for token in logprobs["tokens"]] == [list(top) for top in logprobs["top_logprobs"]]
    for name, values in logprobs.items():
        assert list(chain.from_iterable(chunk[name] for chunk in chunks if chunk)) == values


async def test_reasoning_tokens_are_counted_on_every_route():
    """Streamed and not, and where the answer is retrieved."""
    answers = [sample("<think>\nsome thoughts é🙂\n\nand more\n</think>\n\n42")] * 6
    async with open_stack(*answers, model=model()) as stack, httpx.AsyncClient() as http:
        chat, options = BODIES["chat/completions"], {"stream_options": {"include_usage": True}}
        response = (await post(http, stack, "responses", BODIES["responses"])).json()
        url = f"{stack.session.base_url}/responses/{response['id']}"
        key = {"authorization": f"Bearer {stack.session.api_key}"}
        usages = [
            response["usage"],
            (await stream(http, stack, "responses", BODIES["responses"]))[-1]["response"]["usage"],
            (await http.get(url, headers=key)).json()["usage"],
            (await post(http, stack, "chat/completions", chat)).json()["usage"],
            (await stream(http, stack, "chat/completions", chat | options))[-1]["usage"],
            (await post(http, stack, "messages", BODIES["messages"])).json()["usage"],
            (await stream(http, stack, "messages", BODIES["messages"]))[-2]["usage"],
        ]
    counts = [
        next(iter((usage.get("output_tokens_details") or usage.get("completion_tokens_details")).values()))
        for usage in usages
    ]
    thinking = model().decode(answers[0][: counts[0]])

    assert len(set(counts)) == 1
    assert thinking == "<think>\nsome thoughts é🙂\n\nand more"
