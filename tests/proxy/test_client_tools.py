"""Tools that are no functions: offered to the model as functions, and called in the form of their vendors."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import anthropic
import openai
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from areal_actors.cache.history import canonical_arguments
from areal_actors.client import create_http_client
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    ChatMessage,
    Completion,
    FinishReason,
    InteractionId,
    TextDelta,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStarted,
    Usage,
)
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.client_tools import (
    NEEDED,
    OPENAI_TOOLS,
    format_freeform,
    read_freeform,
    with_additional_tools,
    without_server_tools,
)
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect
from areal_actors_testing.serving import open_scripted_proxy


@pytest.fixture
def anyio_backend() -> str:
    """Use one event loop: dialects do not depend on it."""
    return "asyncio"


STARTED = AnswerStarted(interaction=InteractionId("resp_1"))
EVENTS = TypeAdapter(ResponseStreamEvent)
GRAMMAR = {"syntax": "lark", "definition": 'start: "x"+'}
PATCH = {"type": "custom", "name": "patch", "description": "Edit files.", "format": {"type": "grammar", **GRAMMAR}}
CHAT_PATCH = {
    "type": "custom",
    "custom": {"name": "patch", "description": "Edit files.", "format": {"type": "grammar", "grammar": GRAMMAR}},
}
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SPACES = st.text(" \n\t", max_size=2)
PIECES = st.sampled_from(
    [
        '"',
        "\\",
        "\\n",
        '\\"',
        "\\\\",
        "\\u",
        "\\u00e9",
        "\\ud83d",
        "\\ude00",
        "\\q",
        "}",
        "{",
        "x",
        "é",
        "😀",
        "\n",
        ", ",
    ]
)
ARGUMENTS = st.one_of(
    st.lists(PIECES, max_size=12).map(lambda pieces: '{"input": "' + "".join(pieces)),
    st.lists(PIECES, max_size=12).map(lambda pieces: '{"input": "' + "".join(pieces) + '"}'),
    st.lists(PIECES, max_size=6).map("".join),
    st.text(max_size=12).map(format_freeform),
    st.sampled_from(["", "{}", '{"input": 1}', '{"in', '{"patch": "x"}', "[1]", '{"input": "a", "b": 1}']),
)


def answer_with(*calls: ToolCall, finish=FinishReason.STOP) -> Answer:
    completion = Completion(
        token_ids=[1], logprobs=[-0.5], raw_logprobs=[-1], versions=[0], finish=finish, top_logprobs=()
    )
    message = ChatMessage(role="assistant", content=None, tool_calls=calls)
    usage = Usage(prompt_tokens=5, completion_tokens=1)
    return Answer(interaction=STARTED.interaction, message=message, completion=completion, usage=usage)


def events_of(dialect, parsed, name: str, arguments: str) -> list[dict]:
    """The payloads of a stream with one call, whose arguments arrive in two pieces."""
    call = ToolCall(id="call_1", name=name, arguments=arguments)
    half = len(arguments) // 2
    items = [STARTED, ToolCallStarted(index=0, id="call_1", name=name)]
    items += [ToolArgumentsDelta(index=0, text=piece) for piece in (arguments[:half], arguments[half:])]
    stream = dialect.open_stream(parsed)
    data = b"".join([*(stream.feed(item) for item in (*items, answer_with(call))), stream.finish()])
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]


# ---------------------------------------------------------------------------------------------------- freeform tools


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), spaces=st.tuples(*[SPACES] * 5))
@example(text='say "hi"\\n😀', spaces=("",) * 5)
def test_freeform_input_is_the_text_that_the_model_wrote(text, spaces):
    """In any spelling of JSON; and it comes back as the same arguments."""
    a, b, c, d, e = spaces
    for written in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
        arguments = f'{a}{{{b}"input"{c}:{d}{written}{e}}}'

        assert read_freeform(arguments) == text
        assert canonical_arguments(format_freeform(text)) == canonical_arguments(arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\', "a\\"),
        ('{"input": "a\\"}', 'a"}'),
        ('{"input": "a\\x\\u00"', "a\\x\\u00"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "a", "b": 1}', 'a", "b": 1}'),
        ('{"input": "print("hi")"}', 'print("hi")'),
        ('{"input": 1}', None),
        ('{"in', None),
    ],
)
def test_freeform_input_loses_nothing(arguments, text):
    """Arguments that break off, unknown escapes and further keys."""
    assert read_freeform(arguments) == text


@pytest.mark.parametrize("form", [{"type": "text"}, None, {"type": "grammar", **GRAMMAR}])
def test_freeform_format_is_described_to_the_model(form):
    """On both routes, in both notations."""
    nested = {"type": "grammar", "grammar": GRAMMAR} if form and form["type"] == "grammar" else form
    custom = {"name": "patch", "description": "Edit files.", "format": form}
    chat = ChatDialect().parse(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "custom", "custom": custom | {"format": nested}}],
        }
    )
    responses = ResponsesDialect().parse({"input": "hi", "tools": [{"type": "custom", **custom}]})

    assert chat.request.tools == responses.request.tools
    (tool,) = chat.request.tools
    assert tool.description.startswith("Edit files.")
    assert (GRAMMAR["definition"] in tool.description) is (form is not None and form["type"] == "grammar")
    assert tool.parameters["required"] == ["input"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"format": {"type": "x"}},
        {"format": {"type": "grammar"}},
        {"format": {"type": "grammar", **GRAMMAR, "syntax": ["lark"]}},
        {"format": 3},
    ],
)
def test_malformed_freeform_tool_is_refused_by_its_place(wrong):
    """With the field."""
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        ResponsesDialect().parse({"input": "hi", "tools": [PATCH | wrong]})


@given(arguments=ARGUMENTS)
def test_streamed_freeform_call_equals_the_whole_answer(arguments):
    """Events are those of the SDK, and the item is the one without a stream."""
    dialect = ResponsesDialect(clock=lambda: 1700000000.5)
    parsed = dialect.parse({"input": "hi", "tools": [PATCH, FUNCTION], "stream": True})
    events = events_of(dialect, parsed, "patch", arguments)
    whole = dialect.format_answers(parsed, [answer_with(ToolCall(id="call_1", name="patch", arguments=arguments))])

    for event in events:
        EVENTS.validate_python(event)
    assert events[-1]["response"]["output"] == whole["output"]
    (item,) = whole["output"]
    kind, key = ("custom_tool_call_input", "input") if "input" in item else ("function_call_arguments", "arguments")
    (added,) = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    deltas = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta"]
    (done,) = [e for e in events if e["type"].endswith(f"{kind}.done")]

    assert (added["type"], added[key]) == (item["type"], "")
    assert "".join(deltas) == done[key] == item[key]
    assert {e["type"] for e in events if "custom" in e["type"] or "function" in e["type"]} <= {
        f"response.{kind}.delta",
        f"response.{kind}.done",
    }


@given(arguments=ARGUMENTS)
def test_streamed_freeform_chat_call_equals_the_whole_answer(arguments):
    """It is one chunk, with the call of the answer without a stream."""
    dialect = ChatDialect()
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [CHAT_PATCH], "stream": True}
    parsed = dialect.parse(body)
    events = events_of(dialect, parsed, "patch", arguments)
    answer = answer_with(ToolCall(id="call_1", name="patch", arguments=arguments))
    whole = orjson.loads(orjson.dumps(dialect.format_answers(parsed, [answer])))
    ChatCompletion.model_validate(whole)
    (call,) = whole["choices"][0]["message"]["tool_calls"]

    (call_sent,) = [part for e in events for c in e["choices"] for part in c["delta"].get("tool_calls", ())]

    assert {"index": 0, **call} == call_sent


def test_calls_of_several_kinds_keep_their_order():
    """A function beside a freeform tool and a typed one, each in its own form."""
    dialect = ResponsesDialect(clock=lambda: 0.0)
    tools = [PATCH, FUNCTION, {"type": "shell"}]
    calls = [("patch", '{"input": "a"}'), ("look", "{}"), ("shell", '{"commands": ["ls"]}'), ("shell", '{"cmd": 1}')]
    items = [STARTED]
    for index, (name, arguments) in enumerate(calls):
        items.append(ToolCallStarted(index=index, id=f"call_{index}", name=name))
        items.append(ToolArgumentsDelta(index=index, text=arguments))
    answer = answer_with(*(ToolCall(id=f"call_{i}", name=n, arguments=a) for i, (n, a) in enumerate(calls)))
    parsed = dialect.parse({"input": "hi", "tools": tools})
    stream = dialect.open_stream(parsed)
    data = b"".join(stream.feed(item) for item in (*items, answer))
    added = [
        json.loads(line[6:]) for line in data.decode().split("\n") if "output_item.added" in line and line[0] == "d"
    ]
    output = dialect.format_answers(parsed, [answer])["output"]

    assert [item["type"] for item in output] == ["custom_tool_call", "function_call", "shell_call", "function_call"]
    assert [event["item"]["type"] for event in added] == [item["type"] for item in output]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert json.loads(data.decode().rstrip().rpartition("data: ")[2])["response"]["output"] == output


# ------------------------------------------------------------------------------------------------------- typed tools


def values_of(schema) -> st.SearchStrategy:
    """Values with the form of one of the tables' schemas."""
    match schema["type"]:
        case "object":
            properties, required = schema.get("properties", {}), schema.get("required", ())
            inner = {name: values_of(each) for name, each in properties.items()}
            if "type" in properties:
                return st.sampled_from(properties["type"]["enum"]).flatmap(
                    lambda kind: action_of(kind, inner, required)
                )
            if not inner:
                # One that is empty is what the client adds.
                inner, required = {"A": st.text(max_size=3)}, ("A",)
            return st.fixed_dictionaries(
                {name: inner[name] for name in required},
                optional={name: each for name, each in inner.items() if name not in required},
            )
        case "array":
            return st.lists(values_of(schema["items"]), max_size=2)
        case "string":
            return st.sampled_from(schema["enum"]) if "enum" in schema else st.text("ab 'é", max_size=4)
        case "boolean":
            return st.booleans()
        case _:
            return st.integers(0, 9)


def action_of(kind: str, inner, required) -> st.SearchStrategy:
    """Objects of one type, with what that type needs."""
    needed = {*required, *NEEDED.get(kind, ())} - {"type"}
    optional = {name: each for name, each in inner.items() if name not in {*needed, "type"}}
    return st.fixed_dictionaries({"type": st.just(kind), **{name: inner[name] for name in needed}}, optional=optional)


@given(data=st.data(), kind=st.sampled_from(sorted(OPENAI_TOOLS)))
def test_typed_tool_calls_round_trip_through_the_sdk(data, kind):
    """What fits the tool is an item of its own type, and its echo has the arguments that the model wrote."""
    row = OPENAI_TOOLS[kind]
    arguments = json.dumps(data.draw(values_of(row.parameters)))
    dialect = ResponsesDialect(clock=lambda: 0.0)
    parsed = dialect.parse({"input": "hi", "tools": [{"type": kind}], "stream": True})
    call = ToolCall(id="call_1", name=row.name, arguments=arguments)
    document = orjson.loads(orjson.dumps(dialect.format_answers(parsed, [answer_with(call)])))
    (item,) = document["output"]
    events = events_of(dialect, parsed, row.name, arguments)
    for event in events:
        EVENTS.validate_python(event)

    assert parsed.request.tools[0].name == row.name
    assert item["type"] == row.item
    assert events[-1]["response"]["output"] == document["output"]
    (typed,) = Response.model_validate(document).output
    for echo in (item, orjson.loads(orjson.dumps(typed.to_dict(mode="json", exclude_unset=False)))):
        echoed = dialect.parse({"input": [{"role": "user", "content": "hi"}, echo]}).request.messages[-1].tool_calls[0]
        assert echoed.name == row.name
        assert canonical_arguments(echoed.arguments) == canonical_arguments(arguments)


@given(kind=st.sampled_from(sorted(OPENAI_TOOLS)), arguments=ARGUMENTS | st.sampled_from(['{"commands": "ls"}', "7"]))
def test_typed_tool_with_other_arguments_is_a_function_call(kind, arguments):
    """The client answers the call of an unknown function with an error, which the model reads."""
    row = OPENAI_TOOLS[kind]
    dialect = ResponsesDialect(clock=lambda: 0.0)
    parsed = dialect.parse({"input": "hi", "tools": [{"type": kind}], "stream": True})
    call = ToolCall(id="call_1", name=row.name, arguments=arguments)
    (item,) = dialect.format_answers(parsed, [answer_with(call)])["output"]
    events = events_of(dialect, parsed, row.name, arguments)

    assert (item["type"], item["name"], item["arguments"]) == ("function_call", row.name, arguments)
    assert events[-1]["response"]["output"] == [item]
    assert [e["item"]["type"] for e in events if e["type"] == "response.output_item.added"] == ["function_call"]


ANTHROPIC_TYPES = [
    "bash_20241022",
    "bash_20250124",
    "text_editor_20241022",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
    "memory_20250818",
]


@pytest.mark.parametrize("kind", ANTHROPIC_TYPES)
def test_typed_tools_of_anthropic_are_functions(kind):
    """Any date; under the name that the client gives."""
    tool = {"type": kind, "name": "its_name", "cache_control": None}
    messages = [{"role": "user", "content": "hi"}]
    (function,) = MessagesDialect().parse({"messages": messages, "tools": [tool]}).request.tools
    forced = {"messages": messages, "tools": [tool], "tool_choice": {"type": "tool", "name": "its_name"}}

    assert function.name == "its_name"
    assert function.description
    assert function.parameters["additionalProperties"] is False
    assert MessagesDialect().parse(forced).request.tool_choice == "its_name"


CALLED = {"call_id": "c1", "status": "completed", "id": "fc_0_1"}
RESULTS = [
    ({"type": "custom_tool_call", "name": "patch", "input": "x"}, {"output": "done"}, "done"),
    (
        {"type": "custom_tool_call", "name": "patch", "input": "x"},
        {"output": [{"type": "input_text", "text": "d"}]},
        "d",
    ),
    (
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"output": "a.py"},
        "a.py",
    ),
    (
        {"type": "shell_call", "action": {"commands": ["ls"]}},
        {"output": [{"stdout": "a\n", "stderr": "no", "outcome": {"type": "exit", "exit_code": 2}}]},
        "a\nno\nexit code 2",
    ),
    (
        {"type": "shell_call", "action": {"commands": ["ls"]}},
        {"output": [{"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}]},
        "timeout",
    ),
    (
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        {"status": "failed", "output": "no such file"},
        "failed\nno such file",
    ),
    (
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        {"status": "completed"},
        "completed",
    ),
]


@pytest.mark.parametrize(("call", "result", "text"), RESULTS)
def test_tool_results_are_read_as_text(call, result, text):
    """The model reads a result next to its call; in the SDK's types, local_shell's names its call by ``id``."""
    named = {"call_id": "c1"} if call["type"] != "local_shell_call" else {"id": "c1"}
    answered = {"type": f"{call['type']}_output", **named, **result}
    history = [{"role": "user", "content": "hi"}, CALLED | call, answered]
    message = ResponsesDialect().parse({"input": history}).request.messages[-1]

    assert (message.role, message.content, message.tool_call_id) == ("tool", text, "c1")


@pytest.mark.parametrize("kind", sorted(OPENAI_TOOLS))
def test_tool_choice_names_a_typed_tool_by_type(kind):
    """And a freeform tool by its name; the answer repeats the choice."""
    tools = [{"type": kind}, PATCH]
    parsed = ResponsesDialect().parse({"input": "hi", "tools": tools, "tool_choice": {"type": kind}})
    custom = ResponsesDialect().parse(
        {"input": "hi", "tools": tools, "tool_choice": {"type": "custom", "name": "patch"}}
    )

    assert parsed.request.tool_choice == OPENAI_TOOLS[kind].name
    assert parsed.echo["tool_choice"] == {"type": kind}
    assert custom.request.tool_choice == "patch"
    assert custom.echo["tool_choice"] == {"type": "custom", "name": "patch"}


# ------------------------------------------------------------------------------------------------------ server tools

SERVER = [
    *(
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "web_search_20250305",
    ),
    *("web_fetch_20250910", "code_execution_20250825", "code_interpreter", "file_search", "mcp", "mcp_toolset"),
    *("image_generation", "tool_search", "tool_search_tool_regex_20251119", "advisor_20260301"),
]


@given(kinds=st.lists(st.sampled_from([*SERVER, "function", "bash_20250124", "unknown"]), max_size=5))
def test_server_tools_are_left_out_beside_client_tools(kinds):
    """The request decides, not its user agent; what was left out is named. Alone, they stay and are refused."""
    tools = [{"type": kind, "name": f"t{index}"} for index, kind in enumerate(kinds)]
    own = [tool for tool in tools if tool["type"] not in SERVER]
    body, left_out = without_server_tools({"tools": tools})

    assert body["tools"] == (own or tools)
    assert set(left_out) == ({tool["type"] for tool in tools} - {tool["type"] for tool in own} if own else set())


def test_additional_tools_are_tools_of_the_request():
    """Codex offers all of its tools so under the newest names; a later offer of a name replaces the earlier one."""
    namespace = {"type": "namespace", "name": "files", "tools": [FUNCTION, PATCH]}
    later = FUNCTION | {"description": "Look again."}
    offer = {"type": "additional_tools", "role": "developer", "tools": [FUNCTION, namespace, {"type": "web_search"}]}
    again = {"type": "additional_tools", "role": "developer", "tools": [later]}
    body = {"input": [offer, {"role": "user", "content": "hi"}, again]}
    kept, left_out = without_server_tools(with_additional_tools(body))
    parsed = ResponsesDialect().parse(kept)

    assert left_out == ("web_search",)
    assert [tool.name for tool in parsed.request.tools] == ["look", "files__look", "files__patch"]
    assert parsed.request.tools[0].description == "Look again."
    assert [message.content for message in parsed.request.messages] == ["hi"]
    assert parsed.forms["files__patch"].is_freeform
    assert parsed.forms["files__patch"].namespace == "files"


def test_hosted_shell_is_a_server_tool():
    """Its commands would run on OpenAI's machines."""
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}

    assert without_server_tools({"tools": [hosted, FUNCTION]})[1] == ("shell",)
    with pytest.raises(UnsupportedParameter, match="servers"):
        ResponsesDialect().parse({"input": "hi", "tools": [hosted]})
    assert ResponsesDialect().parse({"input": "hi", "tools": [{"type": "shell", "environment": {"type": "local"}}]})


# --------------------------------------------------------------------------------------------------- through the SDKs


async def patch_script(request):
    """A call of the first tool, then what its result was."""
    if request.messages[-1].role == "tool":
        yield TextDelta(text=request.messages[-1].content)
        return
    yield ToolCallStarted(index=0, id="call_7", name=request.tools[0].name)
    for piece in ('{"inp', 'ut": "*** Begin', ' \\"Patch\\""', "}"):
        yield ToolArgumentsDelta(index=0, text=piece)


@asynccontextmanager
async def connected():
    async with (
        open_scripted_proxy(patch_script) as proxy,
        proxy.open_session() as session,
        create_http_client() as http,
    ):
        yield openai.AsyncOpenAI(base_url=session.base_url, api_key="k", http_client=http, max_retries=0)


@pytest.mark.anyio
async def test_freeform_tool_is_called_through_the_sdk():
    """Responses, streamed and not; chat completions; and the history that follows."""
    async with connected() as client:
        first = await client.responses.create(model="gpt-5.4", input="Edit it.", tools=[PATCH])
        (call,) = first.output
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "patched"}
        second = await client.responses.create(
            model="gpt-5.4", input=[{"role": "user", "content": "Edit it."}, call.to_dict(), result], tools=[PATCH]
        )
        chat = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Edit it."}], tools=[CHAT_PATCH]
        )
        (chat_call,) = chat.choices[0].message.tool_calls
        answered = await client.chat.completions.create(
            model="m",
            messages=[
                {"role": "user", "content": "Edit it."},
                chat.choices[0].message.to_dict(),
                {"role": "tool", "tool_call_id": chat_call.id, "content": "patched"},
            ],
            tools=[CHAT_PATCH],
        )

    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", '*** Begin "Patch"')
    assert (chat_call.type, chat_call.custom.input) == ("custom", '*** Begin "Patch"')
    assert second.output_text == answered.choices[0].message.content == "patched"


@pytest.mark.anyio
async def test_anthropic_bash_is_called_through_the_sdk():
    """Its call is a block like any other."""

    async def script(request):
        yield ToolCallStarted(index=0, id="toolu_1", name=request.tools[0].name)
        yield ToolArgumentsDelta(index=0, text='{"command": "ls"}')

    async with (
        open_scripted_proxy(script) as proxy,
        proxy.open_session() as session,
        anthropic.AsyncAnthropic(
            base_url=session.base_url.rstrip("/").removesuffix("/v1"), api_key="k", max_retries=0
        ) as client,
    ):
        answer = await client.messages.create(
            model="m",
            max_tokens=64,
            messages=[{"role": "user", "content": "List."}],
            tools=[{"type": "bash_20250124", "name": "bash"}],
        )

    (block,) = answer.content
    assert (answer.stop_reason, block.name, block.input) == ("tool_use", "bash", {"command": "ls"})
