"""Bodies that begin as earlier ones did are parsed to the same requests, and refused with the same words."""

from __future__ import annotations

import json
from functools import partial

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from tests.proxy.stack import open_stack, sampled

from areal_actors.client import create_http_client
from areal_actors.domain import ForkReason
from areal_actors.errors import RequestError
from areal_actors.proxy.dialects.blocks import UnsupportedBlocks, replace_blocks
from areal_actors.proxy.dialects.chat.request import parse_chat_request
from areal_actors.proxy.dialects.fields import parse_object
from areal_actors.proxy.dialects.messages.request import parse_anthropic_request
from areal_actors.proxy.dialects.prefixes import PrefixCache
from areal_actors.proxy.dialects.responses.request import parse_response_request

POLICY = UnsupportedBlocks()

TEXTS = st.sampled_from(
    [
        "a",
        "",
        "]",
        '"]}',
        '"messages":[',
        '"input": [{"role":"user","content":"x"}],',
        "é\n\ud83d\ude00",
        "[[[",
        "\\",
        "x-anthropic-billing-header: 7",
    ]
)


def blocks(kind, **more):
    return TEXTS.map(lambda text: {"type": kind, "text": text, **more})


def turn(role, content):
    return st.fixed_dictionaries({"role": st.just(role), "content": content})


CHAT = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXTS}),
    turn("user", st.lists(blocks("text"), min_size=1)),
    TEXTS.map(
        lambda text: {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps({"messages": [text]})}}],
        }
    ),
    turn("user", st.just([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}])),
)
TURNS = st.one_of(
    turn("user", TEXTS),
    turn("user", st.lists(blocks("text"), max_size=3)),
    turn("system", TEXTS),
    turn("assistant", st.lists(blocks("text"), min_size=1, max_size=2)),
    TEXTS.map(
        lambda text: {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": text, "signature": ""},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"messages": [text], "deep": {"a": [1.0, -0.0]}}},
            ],
        }
    ),
    # One element that is several messages.
    TEXTS.map(
        lambda text: {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": text}]},
                {"type": "text", "text": text},
                {"type": "tool_result", "tool_use_id": "d", "content": text, "is_error": True},
            ],
        }
    ),
)
ITEM_IDS = st.sampled_from([{}, {"id": "msg_0_7"}, {"id": "msg_1_7"}, {"id": "rs_0_8"}, {"id": "fc_0_8"}])
ITEMS = st.one_of(
    turn("user", TEXTS),
    turn("developer", st.lists(blocks("input_text"), min_size=1, max_size=2)),
    # Elements of which several are one message.
    st.tuples(ITEM_IDS, turn("assistant", st.lists(blocks("output_text"), max_size=2))).map(
        lambda two: two[0] | two[1]
    ),
    st.tuples(ITEM_IDS, TEXTS).map(
        lambda two: {"type": "reasoning", **two[0], "content": [{"type": "reasoning_text", "text": two[1]}]}
    ),
    st.tuples(ITEM_IDS, TEXTS).map(
        lambda two: {"type": "function_call", **two[0], "call_id": "c", "name": "f", "arguments": json.dumps([two[1]])}
    ),
    TEXTS.map(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}),
    turn("user", st.just([{"type": "input_image", "image_url": "data:image/png;base64,aaaa"}])),
)
SCHEMA = {"anyOf": [{"type": "string"}], "required": ["a", "]"]}
FUNCTIONS = [{"type": "function", "function": {"name": f"f{n}", "parameters": SCHEMA}} for n in range(12)]
FLAT = [{"type": "function", "name": f"f{n}", "parameters": SCHEMA} for n in range(12)]
CUSTOM = [{"name": f"f{n}", "input_schema": SCHEMA | {"type": "object"}} for n in range(12)]
SHARED = {"model": st.just("m"), "temperature": st.sampled_from([1, 0.5])}


@frozen(kw_only=True)
class Route:
    """A dialect as the endpoint uses it: its list, its elements, what else its bodies have, and what is wrong there."""

    parse_request: object
    name: str
    elements: st.SearchStrategy
    others: st.SearchStrategy
    faults: st.SearchStrategy

    def __repr__(self):
        return self.name

    def parse_whole(self, raw):
        return self.parse_request(replace_blocks(parse_object(raw), POLICY))

    def parse_known(self, cache, raw):
        reading = cache.read("client", raw)
        body = replace_blocks(reading.body, POLICY)
        parsed = self.parse_request(body)
        reading.note(body)
        return parsed

    def open_cache(self):
        return PrefixCache(self.name)


ROUTES = {
    "chat": Route(
        parse_request=parse_chat_request,
        name="messages",
        elements=CHAT,
        others=st.fixed_dictionaries(
            {},
            optional=SHARED
            | {
                "metadata": st.just({"messages": "[1]"}),
                "stop": st.just(["]", "]}"]),
                "tools": st.sampled_from([FUNCTIONS, []]),
            },
        ),
        faults=st.sampled_from(
            [{"role": "nobody"}, {"role": "user"}, 7, {"role": "user", "content": [{"type": "image_url"}]}]
        ),
    ),
    "messages": Route(
        parse_request=parse_anthropic_request,
        name="messages",
        elements=TURNS,
        others=st.fixed_dictionaries(
            {},
            optional=SHARED
            | {
                "system": st.one_of(TEXTS, st.lists(blocks("text", cache_control={"type": "ephemeral"}), max_size=3)),
                "metadata": st.just({"messages": "[1]"}),
                "tools": st.sampled_from([CUSTOM, []]),
            },
        ),
        faults=st.sampled_from(
            [{"role": "nobody"}, {"role": "user"}, 7, {"role": "user", "content": [{"type": "tool_result"}]}]
        ),
    ),
    "responses": Route(
        parse_request=parse_response_request,
        name="input",
        elements=ITEMS,
        others=st.fixed_dictionaries(
            {},
            optional=SHARED
            | {
                "instructions": TEXTS,
                "metadata": st.just({"input": "[1]"}),
                "previous_response_id": st.just("resp_1"),
                "tools": st.sampled_from([FLAT, []]),
            },
        ),
        faults=st.sampled_from(
            [{"role": "nobody"}, {"role": "user"}, 7, {"type": "item_reference", "id": "msg_0_9"}, {"type": "file"}]
        ),
    ),
}


def outcome(parse, *arguments):
    try:
        return parse(*arguments)
    except RequestError as error:
        return type(error), str(error), error.param


def mark(element):
    """Mark the last block of a message for caching, as coding agents mark their last messages."""
    content = element.get("content") if isinstance(element, dict) else None
    if not isinstance(content, list) or not content:
        return element
    return element | {"content": [*content[:-1], content[-1] | {"cache_control": {"type": "ephemeral"}}]}


def write(name, elements, before, after, *, has_spaces, is_ascii=False, twice=False):
    separators = (", ", ": ") if has_spaces else (",", ":")
    dump = partial(json.dumps, separators=separators, ensure_ascii=is_ascii)
    said = f"{dump(name)}{separators[1]}{dump(elements)}"
    fields = [[f"{dump(key)}{separators[1]}{dump(value)}" for key, value in some] for some in (before, after)]
    parts = [*fields[0], said, *fields[1], *([said] if twice else [])]
    return ("{" + separators[0].join(parts) + "}").encode("utf-8", "surrogatepass")


BYTES = st.sampled_from(
    [*(bytes([byte]) for byte in b' \n,{}[]":\\1a\x00\xe9'), b'"role":"user",', b"null,", b"\\u0041"]
)
EDITS = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.one_of(st.just(b""), BYTES))


def edit(raw, place, num_deleted, inserted):
    """Replace some bytes at a place, which is a share of the length."""
    at = int(place * len(raw))
    return raw[:at] + inserted + raw[at + num_deleted :]


@given(data=st.data(), route=st.sampled_from([*ROUTES]))
def test_a_conversation_is_parsed_as_if_each_body_were_the_first(data, route):
    """Whatever the texts contain, in whichever order the keys come, and whatever changes or goes wrong on the way."""
    route = ROUTES[route]
    cache, elements = route.open_cache(), []
    has_spaces, has_marks = data.draw(st.booleans()), data.draw(st.booleans())
    before = data.draw(route.others)
    for new, after in data.draw(
        st.lists(st.tuples(st.lists(route.elements, min_size=1, max_size=3), route.others), min_size=2, max_size=5)
    ):
        elements = elements + new
        kind = data.draw(
            st.sampled_from(
                ["", "", "", "fault", "cut", "twice", "edit", "drop", "keys", "spaces", "ascii", "head", "bytes"]
            )
        )
        at = data.draw(st.integers(0, len(elements) - 1))
        if kind == "edit":
            elements = [*elements[:at], data.draw(route.elements), *elements[at + 1 :]]
        elif kind == "drop":
            elements = [*elements[:at], *elements[at + 1 :]] or elements
        elif kind == "keys":
            elements = [*elements[:at], dict(reversed(elements[at].items())), *elements[at + 1 :]]
        elif kind == "head":
            before = data.draw(route.others)
        sent = [*elements, data.draw(route.faults)] if kind == "fault" else elements
        if has_marks:
            sent = [*sent[:-2], *map(mark, sent[-2:])]
        raw = write(
            route.name,
            sent,
            before.items(),
            after.items(),
            has_spaces=has_spaces is not (kind == "spaces"),
            is_ascii=kind == "ascii",
            twice=kind == "twice",
        )
        if kind == "cut":
            raw = raw[: at * len(raw) // len(elements)]
        if kind == "bytes":
            raw = edit(raw, *data.draw(EDITS))

        assert outcome(route.parse_known, cache, raw) == outcome(route.parse_whole, raw)


@given(data=st.data(), route=st.sampled_from([*ROUTES]), edits=st.lists(EDITS, min_size=1, max_size=3))
def test_any_change_of_a_known_body_is_parsed_as_it_is(data, route, edits):
    """Whatever bytes are deleted, replaced or inserted, and wherever: in a known message, a key, or what is around."""
    route = ROUTES[route]
    cache = route.open_cache()
    elements = data.draw(st.lists(route.elements, min_size=2, max_size=6))
    before, after = data.draw(route.others), data.draw(route.others)
    has_spaces = data.draw(st.booleans())
    raws = [
        write(route.name, elements[:number], before.items(), after.items(), has_spaces=has_spaces)
        for number in range(1, len(elements) + 1)
    ]
    for raw in raws:
        outcome(route.parse_known, cache, raw)
    changed = raws[-1]
    for place in edits:
        changed = edit(changed, *place)

    assert outcome(route.parse_known, cache, changed) == outcome(route.parse_whole, changed)
    assert outcome(route.parse_known, cache, raws[-1]) == outcome(route.parse_whole, raws[-1])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "first",
    [
        '{"chat_template_kwargs":{"NAME":[A]},"NAME":[B]}',
        '{"NAME":[A],"NAME":[B]}',
        '{"NAME":[A],"NAME":[A,B]}',
        '{"NAME":[B],"chat_template_kwargs":{"NAME":[A]}}',
        '{"user":"\\"NAME\\":[","NAME":[B]}',
    ],
)
@pytest.mark.parametrize("second", ['{"NAME":[A]}', '{"NAME":[A,B]}', '{"NAME":[B],"NAME":[A]}', '{"NAME":[B,A]}'])
def test_another_list_of_the_same_name_is_not_the_messages(route, first, second):
    """One within another field, and one that a later key of the same name replaces."""
    route = ROUTES[route]
    cache = route.open_cache()
    for body in (first, second, first, second):
        raw = body.replace("NAME", route.name)
        for name in "AB":
            raw = raw.replace(f"{name}", json.dumps({"role": "user", "content": f"said {name.lower()}"}))
        raw = raw.encode()

        assert outcome(route.parse_known, cache, raw) == outcome(route.parse_whole, raw)


CONVERSATIONS = {
    "chat": lambda n: [{"role": "assistant", "content": f"answer ] {n}"}, {"role": "user", "content": "go"}],
    "messages": lambda n: [
        {"role": "assistant", "content": [{"type": "tool_use", "id": f"c{n}", "name": "f", "input": {"a": [n]}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{n}", "content": f"] {n}"}]},
    ],
    "responses": lambda n: [
        {"type": "reasoning", "id": f"rs_0_{n}", "content": [{"type": "reasoning_text", "text": "]"}]},
        {"type": "function_call", "id": f"fc_0_{n}", "call_id": f"c{n}", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": f"c{n}", "output": f"] {n}"},
    ],
}


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_long_conversation_parses_only_its_new_messages(route, has_marks):
    """Whatever changes before and behind the messages; the known ones are the same objects."""
    conversation, route = CONVERSATIONS[route], ROUTES[route]
    cache, before, elements = route.open_cache(), None, []
    for number in range(20):
        elements = [*elements, *conversation(number)]
        sent = [*elements[:-3], *map(mark, elements[-3:])] if has_marks else elements
        after = {"model": "m", "metadata": {"turn": str(number)}}
        raw = write(route.name, sent, {"temperature": number / 20}.items(), after.items(), has_spaces=False)
        reading = cache.read("client", raw)
        assert 0 < len(reading.body[route.name]) <= 6 or number == 0

        parsed = route.parse_known(cache, raw).request.messages

        assert before is None or all(a is b for a, b in zip(before[:-4], parsed, strict=False))
        before = parsed


def test_agents_that_talk_in_turns_keep_their_prefixes():
    """Four conversations of one client that begin alike; each is recognised to its end."""
    route = ROUTES["chat"]
    cache, start = route.open_cache(), [{"role": "system", "content": "You are an agent."}]
    agents = [[*start, {"role": "user", "content": f"task {n}"}] for n in range(4)]
    for turn_number in range(30):
        for agent in agents:
            agent += [{"role": "assistant", "content": f"{turn_number}"}, {"role": "user", "content": "go"}]
            raw = write(route.name, agent, (), (), has_spaces=False)

            num_new = len(cache.read("client", raw).body["messages"])

            assert num_new <= 3 or turn_number == 0
            route.parse_known(cache, raw)


def test_prefixes_of_many_clients_are_bounded():
    """The clients that were seen last are known."""
    cache, route = PrefixCache("messages"), ROUTES["chat"]
    bodies = [
        b'{"messages":[{"role":"user","content":"%b%d"},{"role":"user","content":"x"}]}' % (b"x" * 2**20, index)
        for index in range(40)
    ]
    for index, raw in enumerate(bodies):
        reading = cache.read(index, raw)
        route.parse_request(reading.body)
        reading.note(reading.body)

    known = [not cache.read(index, raw).body["messages"] for index, raw in enumerate(bodies)]

    assert known == [False] * (40 - sum(known)) + [True] * sum(known)
    assert 25 < sum(known) < 40


ECHOES = {
    "chat/completions": lambda answer: [answer["choices"][0]["message"]],
    "messages": lambda answer: [{"role": "assistant", "content": answer["content"]}],
    "responses": lambda answer: answer["output"],
}


@pytest.mark.anyio
@pytest.mark.parametrize("operation", ECHOES)
async def test_a_long_conversation_over_http_is_one_chain(operation):
    """Each turn extends the tokens of the one before, and a mistake is named by its place in the whole conversation."""
    name = "input" if operation == "responses" else "messages"
    asked = [{"role": "user", "content": "What is it? " * 300}]
    async with open_stack(*map(sampled, "abcdef")) as stack, create_http_client() as http:
        url = f"{stack.session.base_url}/{operation}"
        headers = {"authorization": f"Bearer {stack.session.api_key}"}
        for _ in "abcdef":
            answer = (await http.post(url, json={name: asked}, headers=headers)).raise_for_status().json()
            wrong = await http.post(url, json={name: [*asked, {"role": "nobody"}]}, headers=headers)
            assert wrong.status_code == 400
            assert f"{name}[{len(asked)}].role" in wrong.text
            asked += [*ECHOES[operation](answer), {"role": "user", "content": "And further?"}]
        turns = await stack.record()

    assert [turn.parent for turn in turns] == [None, *(turn.id for turn in turns[:-1])]
    assert [turn.fork for turn in turns] == [ForkReason.ROOT, *[None] * 5]
    assert all(len(turn.prompt_suffix) < 40 for turn in turns[1:])
