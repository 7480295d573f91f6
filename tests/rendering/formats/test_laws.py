"""What holds for every tool format that is known by name, whatever family it belongs to."""

from __future__ import annotations

import json
from functools import cache
from itertools import count, dropwhile

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.rendering.formats.grammars import texts_of

from areal_actors.domain import TextDelta, Tool, ToolArgumentsDelta, ToolCall, ToolCallStarted
from areal_actors.rendering.parsers import TOOL_FORMATS, join_deltas

ADD = Tool(
    name="add",
    description="Adds.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "loud": {"type": "boolean"}},
        "required": ["a"],
    },
)
WRITE = Tool(
    name="write-file",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "mode": {"enum": ["new", "old", 3]},
            "kind": {"const": "text"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "lines": {"type": "array", "items": {"type": "string"}},
            "like": {"$ref": "#/$defs/point"},
        },
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
)
NOW = Tool(name="now")
TOOLS = (ADD, WRITE, NOW)

every_format = pytest.mark.parametrize("form", TOOL_FORMATS.values(), ids=TOOL_FORMATS)

names = st.from_regex(r"[A-Za-z_][\w-]{0,8}", fullmatch=True)
tags = sorted({tag for form in TOOL_FORMATS.values() for tag in form.markers} | {"<function=f>", "</function>"})
words = st.sampled_from([*tags, '"', "'", "\\", "\n", "\\n", "é", "😀", "{", "}]", "<", " ", "null", "True", "12"])
texts = st.lists(words | st.text(max_size=3), max_size=4).map("".join)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
arguments = st.dictionaries(names, values, max_size=3)

fragments = st.sampled_from(
    [
        *tags,
        *["<function=a>", "<parameter=b>", "</parameter>", "</function>", "<arg_key>b</arg_key>", "<arg_value>"],
        *['{"name": "a", "arguments": {"b": 1}}', '{"name": "a", "parameters": {}}', '[{"name": "a"}]', "[a(b=1)]"],
        *["[", "]", "(", ")", "{", "}", '"', "'", "\\", ";", ",", "=", ":", "a", "1", ".", "\n", " ", "<", "é", "x"],
    ]
)
CALLS = ("{first call}", "{second call}")
"""Stand for two calls as the family writes them."""
answers = st.lists(fragments | st.sampled_from(CALLS) | st.text(max_size=3), max_size=14).map("".join)


def write_calls(form, text):
    """``text`` with the calls that it stands for."""
    for index, (place, given_arguments) in enumerate(zip(CALLS, ('{"a": 1}', '{"b": "x é"}'), strict=True)):
        text = text.replace(
            place, form.format_call(ToolCall(id=f"call{index:05}", name="f", arguments=given_arguments))
        )
    return text


def read(form, *pieces, tools=TOOLS):
    """What the pieces of an answer say, calls numbered."""
    numbers = count()
    parser = form.open_parser(lambda: f"call_{next(numbers)}", tools)
    return [delta for piece in pieces for delta in parser.feed(piece)] + list(parser.finish())


def parse(form, *pieces, tools=TOOLS):
    """The message that the pieces join to."""
    return join_deltas(read(form, *pieces, tools=tools))


def said(message):
    """The calls without their ids, some of which the model itself gives."""
    return [(call.name, call.arguments) for call in message.tool_calls]


def typed(name, arguments):
    """A tool that takes these arguments: text is declared to be text, as it is between tags."""
    properties = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
    return Tool(name=name, parameters={"type": "object", "properties": properties})


ENDS = {
    **dict.fromkeys(("qwen-coder", "seed", "minimax-m2"), "</parameter>"),
    **dict.fromkeys(("deepseek-v3.2", "deepseek-v4"), "</｜DSML｜parameter>"),
    "glm": "</arg_value>",
    "gemma": '<|"|>',
}
"""What a value cannot contain, because nothing is escaped."""


@every_format
@given(data=st.data())
def test_formatted_call_is_parsed_to_the_same_call(form, data):
    """Its arguments may be any JSON, and it may be streamed in any pieces."""
    name, given_arguments = data.draw(names), data.draw(arguments)
    text = json.dumps(given_arguments, ensure_ascii=False)
    end = next((end for known, end in ENDS.items() if TOOL_FORMATS[known] is form), None)
    assume(end is None or json.dumps(end, ensure_ascii=False)[1:-1] not in text)
    written = form.format_call(ToolCall(id="call_0", name=name, arguments=text))
    tools = [typed(name, given_arguments)]
    message = parse(form, written, tools=tools)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]

    assert [(name, text)] == said(message)
    assert message == join_deltas(read_eagerly(form, *pieces, tools=tools))
    assert message.content is None


@every_format
@given(text=answers, data=st.data())
def test_parsing_does_not_depend_on_chunks(form, text, data):
    """However an answer is cut, the message is the same, and every call is started once, before its arguments."""
    text = write_calls(form, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas = read(form, *text)
    calls = [delta.index for delta in deltas if isinstance(delta, ToolCallStarted)]

    assert parse(form, text) == parse(form, *pieces) == join_deltas(deltas)
    assert list(range(len(calls))) == calls
    assert all(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert all(json.loads(call.arguments) is not None for call in join_deltas(deltas).tool_calls)


@every_format
@given(text=answers)
def test_text_is_not_lost(form, text):
    """Without a call the content is the text; with one, what no format has for itself is somewhere in the message."""
    text = write_calls(form, text)
    message = parse(form, text)

    if message.tool_calls:
        shown = "".join([message.content or "", *(name + arguments for name, arguments in said(message))])
        in_tags = sum(text.count(tag) * tag.count("x") for tag in form.markers)
        assert text.count("x") <= shown.count("x") + text.count("\\x") + in_tags
        assert text.count("é") <= shown.count("é")
    else:
        assert text == message.content


@cache
def enforced(form, *, is_parallel):
    """Texts that match the grammar of enforced calls."""
    return texts_of(form.constrain(TOOLS, is_parallel=is_parallel))


@every_format
@given(data=st.data(), is_parallel=st.booleans())
def test_enforced_calls_are_parsed(form, data, is_parallel):
    """Any text that the grammar of enforced calls allows is calls of the offered tools, and nothing else."""
    message = parse(form, data.draw(enforced(form, is_parallel=is_parallel)))

    assert message.content is None
    assert len(message.tool_calls) >= 1 if is_parallel else len(message.tool_calls) == 1
    for name, written in said(message):
        check_arguments(next(tool for tool in TOOLS if tool.name == name), json.loads(written))


def check_arguments(tool, given_arguments):
    """Required arguments are there, unknown ones are not, and the types are those of the schema."""
    properties = tool.parameters.get("properties", {})
    types = {"integer": int, "number": int | float, "boolean": bool, "string": str, "array": list}

    assert set(tool.parameters.get("required", ())) <= set(given_arguments) <= set(properties)
    for key, value in given_arguments.items():
        assert isinstance(value, types.get(properties[key].get("type"), object)), (key, value)
    assert isinstance(given_arguments.get("like", {}), dict)
    assert given_arguments.get("mode", 3) in ("new", "old", 3)


@every_format
def test_call_of_an_unknown_tool_is_a_call(form):
    """The agent tells the model that there is no such tool; the parser does not hide what was said."""
    call = ToolCall(id="call_0", name="unheard_of", arguments='{"a": 1}')

    assert [("unheard_of", '{"a": 1}')] == said(parse(form, form.format_call(call), tools=[]))


@every_format
def test_calls_have_text_around_them_and_follow_each_other(form):
    """What stands behind calls is content; two calls are two."""
    first, second = (form.format_call(ToolCall(id=f"id{n}", name="now", arguments="{}")) for n in range(2))
    message = parse(form, f"{first}\n\nDone.")

    assert ([("now", "{}")], "\n\nDone.") == (said(message), message.content)
    assert 2 == len(said(parse(form, first + "\n" + second)))


@every_format
def test_long_answers_are_read_in_time(form):
    """Time grows with the text, not with its square: open tags, open strings, depth, and one long argument."""
    size = 60_000
    call = form.format_call(ToolCall(id="call_0", name="f", arguments='{"a": 1}'))
    hostile = [
        *form.markers,
        call,
        call[: len(call) // 2],
        call[: -len(call) // 4],
        " ",
        "[",
        "{",
        '"',
        '{"a":',
        "[f(a=",
    ]
    hostile += ["<tool_call>\n<function=f>\n<parameter=a>\n", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"]
    long = form.format_call(ToolCall(id="call_0", name="f", arguments=json.dumps({"a": "x y\n" * (size // 4)})))

    for unit in hostile:
        message = parse(form, unit * (size // len(unit)))
        assert message.content or message.tool_calls
    pieces = [long[at : at + 3] for at in range(0, len(long), 3)]
    assert 1 == len(parse(form, *pieces, tools=[typed("f", {"a": ""})]).tool_calls)


@every_format
def test_depth_is_bounded(form):
    """JSON nested too deeply for a stack is text, however it is written."""
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    written = form.format_call(ToolCall(id="call_0", name="f", arguments='{"a": 1}')).replace('{"a": 1}', deep)
    message = parse(form, written)

    assert all(len(call.arguments) < 300_000 for call in message.tool_calls)
    assert all(isinstance(delta, TextDelta | ToolCallStarted | ToolArgumentsDelta) for delta in read(form, written))


@every_format
def test_tools_and_results_are_shown(form):
    """A model whose template knows no tools reads names, descriptions, parameters, and what came of a call."""
    block = form.format_tools([ADD, WRITE])

    assert all(word in block for word in ("add", "Adds.", "write-file", "path", "lines"))
    assert "42 °C" in form.format_result("42 °C")


@every_format
def test_arguments_that_are_no_object_can_be_written(form):
    """A client may send anything back as the arguments of a call; the prompt shows it."""
    for written in ("oops", "[1]", "", '"text"', "null", "NaN"):
        assert written.strip('"') in form.format_call(ToolCall(id="call_0", name="f", arguments=written))


# ------------------------------------------------------------------------------------------------- eager parsers


def read_eagerly(form, *pieces, tools=TOOLS):
    """What the pieces say to a parser that emits calls while they are read."""
    numbers = count()
    parser = form.open_parser(lambda: f"call_{next(numbers)}", tools)
    parser.is_eager = True
    return [delta for piece in pieces for delta in parser.feed(piece)] + list(parser.finish())


@every_format
@given(data=st.data())
def test_call_that_is_cut_off_is_the_same_in_a_stream(form, data):
    """The answer ends anywhere within calls, by its length or by a stop string: the client reads the same call."""
    calls = [
        ToolCall(id=f"call{index:05}", name="f", arguments='{"a": "some words", "b": [1, {}]}') for index in (0, 1)
    ]
    written = "so " + "\n".join(map(form.format_call, calls))
    text = written[: data.draw(st.integers(0, len(written)))]
    deltas = list(read_eagerly(form, *text))
    whole, streamed = parse(form, text), join_deltas(deltas)

    assert said(whole) == said(streamed)
    assert (whole.content or "") == (streamed.content or "")
    # The white space between the text and the call belongs to the format, and does not become text after the call.
    after = dropwhile(lambda delta: not isinstance(delta, ToolCallStarted), deltas)
    assert not "".join(delta.text for delta in after if isinstance(delta, TextDelta)).isspace()


@every_format
@given(text=answers)
def test_eager_parser_loses_no_text_and_starts_each_call_once(form, text):
    """Whatever breaks off: each call is started once, in order, and text that no format has for itself remains."""
    text = write_calls(form, text)
    deltas = read_eagerly(form, *text)
    calls = [delta.index for delta in deltas if isinstance(delta, ToolCallStarted)]
    message = join_deltas(deltas)
    shown = "".join([message.content or "", *(name + arguments for name, arguments in said(message))])

    assert list(range(len(calls))) == calls
    assert text.count("é") <= shown.count("é")
    if not message.tool_calls:
        assert text == message.content


# -------------------------------------------------------------------------------------------------- odd arguments

STRANGE = st.sampled_from(
    [
        *['"\\ud83d"', '"\\uDE00 x"', '"\\ud83d\\ude00"', '"\\ud83d\\ud83d\\ude00"', '"\\ude00\\ud83d"', '"\\\\ud83d"'],
        *[
            "98765432109876543210",
            "-98765432109876543210",
            "9" * 300,
            "1.0",
            "-0",
            "-0.0",
            "1E5",
            "1e-7",
            "2e308",
            "1٣",
        ],
        *["NaN", "-Infinity", "1e400", "01", "9" * 5000, '"a\tb"', '"\x1f"', "[1,]", '{"k": 1, "k": 2}', "tru", "'a'"],
        *["[" * depth + "]" * depth for depth in (97, 98, 99, 100, 101)],
        *["[" * depth + "1" + "]" * depth for depth in (97, 98, 99, 100, 101)],
        *['"é\u2028"', '""', "{}", "[]", '"\\/"', '"\\x"', '"\\u12"'],
    ]
)
strange_objects = st.lists(
    st.tuples(st.sampled_from(['"a"', '"b"', '"\\ud800"', '"\\u00e9"']), STRANGE), min_size=1, max_size=3
).map(lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}")


def write_strangely(form, text, *, is_quoted):
    """A call whose arguments are this text, whatever it is; in a string if the family writes them under a key."""
    written = form.format_call(ToolCall(id="call_0", name="f", arguments='{"a": 1}'))
    is_under_key = '"name"' in written
    if '{"a": 1}' not in written:
        # Values between tags, or as literals of Python.
        written = form.format_call(ToolCall(id="call_0", name="f", arguments='{"a": "é0"}'))
        return written.replace("'é0'", text).replace("é0", text)
    return written.replace('{"a": 1}', json.dumps(text) if is_quoted and is_under_key else text)


@every_format
@given(text=strange_objects, is_quoted=st.booleans(), data=st.data())
def test_odd_arguments_are_strict_json_and_the_same_in_a_stream(form, text, is_quoted, data):
    """A call that is read is strict JSON, whether it is read at once or while it is written, and all of it is UTF-8."""
    written = write_strangely(form, text, is_quoted=is_quoted)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=8)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    message, streamed = parse(form, written), join_deltas(read_eagerly(form, *pieces))

    for name, argument_text in said(message):
        assert name == "f"
        assert isinstance(orjson.loads(argument_text), dict)
    if message.tool_calls:
        assert streamed == message
    for said_text in (message.content or "", streamed.content or "", *map("".join, said(message) + said(streamed))):
        said_text.encode()


JSON_CALLS = ("hermes", "llama-json", "mistral")
"""Formats that write a call as an object which has its name."""


USUAL_CALLS = [
    *(f'{{"name": "f", "{key}": {{"a": "x"}}}}' for key in ("arguments", "parameters", "args", "input")),
    *(f'{{"{key}": {{"a": "x"}}, "name": "f"}}' for key in ("arguments", "parameters", "args", "input")),
    '{"name": "f", "parameters": "{\\"a\\": \\"x\\"}"}',
    '{"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}',
    '{"id": "1", "function": {"arguments": "{\\"a\\": \\"x\\"}", "name": "f"}}',
    '{"name": "f", "id": "1", "type": "function", "arguments": {"a": "x"}}',
]


@pytest.mark.parametrize("name", JSON_CALLS)
def test_arguments_are_read_under_every_usual_key(name):
    """The key is that of another API; the call is the same, at once and in a stream."""
    form = TOOL_FORMATS[name]
    for body in USUAL_CALLS:
        written = form.format_call(ToolCall(id="call_0", name="g", arguments="{}"))
        written = written.replace(written[written.index("{") : written.rindex("}") + 1], body)

        for message in (parse(form, written), join_deltas(read_eagerly(form, *written))):
            assert [("f", {"a": "x"})] == [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


UNUSUAL_CALLS = [
    '{"name": "f", "param": {"a": "x"}}',
    '{"name": "f", "a": "x"}',
    '{"name": "f", "arguments": {}, "parameters": {"a": "x"}}',
    '{"name": "f", "arguments": null, "parameters": {"a": "x"}}',
    '{"name": "f", "arguments": {}, "arguments": {"a": "x"}}',
    '{"tool": "f", "arguments": {"a": "x"}}',
    '{"function": "f", "arguments": {"a": "x"}}',
    '{"function": {"name": "f"}, "arguments": {"a": "x"}}',
    '{"name": "f", "arguments": [{"a": "x"}]}',
    '[{"name": "f", "arguments": {"a": "x"}}]',
    'f({"a": "x"})',
    'f\n{"a": "x"}',
]


@every_format
def test_call_has_the_arguments_that_were_written(form):
    """Either they are the arguments of the call, or the agent reads them in the text."""
    for body in UNUSUAL_CALLS:
        for opening, closing in [(marker, "") for marker in form.markers] + [("", ""), ("<tool_call>", "</tool_call>")]:
            written = f"{opening}\n<function=f>{body}</function>\n{closing}" if "qwen" in str(type(form)) else ""
            for text in (f"{opening}{body}{closing}", written):
                for message in (parse(form, text), join_deltas(read_eagerly(form, *text))):
                    shown = (message.content or "") + "".join(arguments for _, arguments in said(message))
                    assert text.count('"x"') == shown.count('"x"')


EAGER = [name for name in TOOL_FORMATS if name not in ("pythonic", "mistral")]
"""Lists of calls are known to be calls only at their end; the ids of Mistral's list follow the arguments."""


@pytest.mark.parametrize("name", EAGER)
def test_arguments_arrive_as_they_are_written(name):
    """The name first, then pieces of the arguments, long before the call is complete."""
    form = TOOL_FORMATS[name]
    text = json.dumps({"path": "a.py", "note": "some words that take a while"})
    written = form.format_call(ToolCall(id="call_0", name="write-file", arguments=text))
    numbers = count()
    parser = form.open_parser(lambda: f"call_{next(numbers)}", TOOLS)
    parser.is_eager = True
    deltas = [delta for char in written[: written.index("while")] for delta in parser.feed(char)]
    pieces = [delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta)]

    assert isinstance(deltas[0], ToolCallStarted)
    assert deltas[0].name == "write-file"
    assert len(pieces) > 1
    assert text.startswith("".join(pieces))
