"""Bodies that begin as earlier ones did are parsed to the same requests, and refused with the same words."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import RequestError
from areal_actors.proxy.dialects.blocks import UnsupportedBlocks, replace_blocks
from areal_actors.proxy.dialects.chat.repeats import PrefixCache
from areal_actors.proxy.dialects.chat.request import parse_chat_request
from areal_actors.proxy.exchange import parse_object

POLICY = UnsupportedBlocks().for_client("codex/1")


def parse_whole(raw):
    return parse_chat_request(replace_blocks(parse_object(raw), POLICY))


def parse_known(cache, raw):
    """Parse as the endpoint does."""
    known = cache.find("client", raw)
    body = None if known is None else known.parse(raw)
    if body is None:
        known, body = None, replace_blocks(parse_object(raw), POLICY)
    else:
        body = known.restore(replace_blocks(body, POLICY, num_known=len(known.messages)))
    parsed = parse_chat_request(body)
    cache.note("client", raw, known, parsed.request.messages)
    return parsed


def outcome(parse, *arguments):
    try:
        return parse(*arguments)
    except RequestError as error:
        return type(error), str(error)


TEXTS = st.sampled_from(
    [
        "a",
        "",
        "]",
        '"]}',
        '"messages":[',
        '"messages": [{"role":"user","content":"x"}],',
        "é\n\ud83d\ude00",
        "[[[",
        "\\",
    ]
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "content": st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), min_size=1),
        }
    ),
    TEXTS.map(
        lambda text: {
            "role": "assistant",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": json.dumps({"messages": [text]})}}],
        }
    ),
    st.just({"role": "user", "content": [IMAGE]}),
)
FAULTS = st.sampled_from(
    [{"role": "nobody"}, {"role": "user"}, 7, {"role": "user", "content": [{"type": "image_url"}]}]
)
SCHEMA = {"anyOf": [{"type": "string"}], "required": ["a", "]"]}
TOOLS = [{"type": "function", "function": {"name": f"f{n}", "parameters": SCHEMA}} for n in range(12)]
OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m"),
        "metadata": st.just({"messages": "[1]"}),
        "temperature": st.just(1),
        "stop": st.just(["]", "]}"]),
        "tools": st.sampled_from([TOOLS, []]),
    },
)


def write(messages, before, after, *, has_spaces, twice):
    separators = (", ", ": ") if has_spaces else (",", ":")
    parts = [f"{json.dumps(name)}{separators[1]}{json.dumps(value, separators=separators)}" for name, value in before]
    said = f'"messages"{separators[1]}{json.dumps(messages, separators=separators, ensure_ascii=False)}'
    parts.append(said)
    parts += [f"{json.dumps(name)}{separators[1]}{json.dumps(value, separators=separators)}" for name, value in after]
    parts += [said] if twice else []
    return ("{" + separators[0].join(parts) + "}").encode("utf-8", "surrogatepass")


@given(
    turns=st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), OTHERS), min_size=2, max_size=5),
    before=OTHERS,
    has_spaces=st.booleans(),
    fault=st.tuples(st.integers(0, 6), st.sampled_from(["message", "cut", "twice", "edit", "spaces"]), FAULTS),
)
def test_a_conversation_is_parsed_as_if_each_body_were_the_first(turns, before, has_spaces, fault):
    """Whatever the texts contain, in whichever order the keys come, and whatever goes wrong on the way."""
    cache, messages = PrefixCache(), []
    for index, (new, after) in enumerate(turns):
        messages = messages + new
        kind = fault[1] if index == fault[0] else ""
        if kind == "edit":
            messages = [{"role": "user", "content": "edited"}, *messages[1:]]
        sent = [*messages, fault[2]] if kind == "message" else messages
        is_spaced = has_spaces is not (kind == "spaces")
        raw = write(sent, before.items(), after.items(), has_spaces=is_spaced, twice=kind == "twice")
        if kind == "cut":
            raw = raw[: len(raw) * 2 // 3]

        assert outcome(parse_known, cache, raw) == outcome(parse_whole, raw)


def test_a_long_conversation_parses_only_its_new_messages():
    """In the key order of OpenAI's SDK, with tools behind the messages; the known messages are the same objects."""
    cache, before, messages = PrefixCache(), None, []
    for turn in range(20):
        messages = [*messages, {"role": "assistant", "content": f"answer ] {turn}"}, {"role": "user", "content": "go"}]
        raw = write(messages, (), {"model": "m", "tools": TOOLS}.items(), has_spaces=False, twice=False)
        assert (cache.find("client", raw) is not None) is (turn > 0)
        parsed = parse_known(cache, raw)
        assert before is None or all(a is b for a, b in zip(before, parsed.request.messages, strict=False))
        before = parsed.request.messages


def test_prefixes_of_many_clients_are_bounded():
    """The clients that were seen last are known."""
    cache = PrefixCache()
    messages = parse_chat_request({"messages": [{"role": "user", "content": "x"}]}).request.messages
    bodies = [b'{"messages":[{"role":"user","content":"%b%d"}]}' % (b"x" * 2**20, index) for index in range(40)]
    for index, raw in enumerate(bodies):
        cache.note(index, raw, None, messages)

    known = [cache.find(index, raw) is not None for index, raw in enumerate(bodies)]

    assert known == [False] * (40 - sum(known)) + [True] * sum(known)
    assert 25 < sum(known) < 40
