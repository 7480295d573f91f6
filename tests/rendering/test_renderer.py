"""Answers from ids to messages, and prompts from messages to ids."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rendering import templates
from tests.rendering.conversations import TOOL, hostile_texts, renderer_of, sample, say, write_call
from tokenizers import processors

from areal_actors.domain import ChatMessage, Tool, ToolCall
from areal_actors.errors import RenderError
from areal_actors.models.built_in import SPECIAL_TOKENS, create_tiny_tokenizer
from areal_actors.rendering import TextDelta, create_renderer, join_deltas
from areal_actors_testing.families import FAMILIES

names = st.sampled_from(["CHATML", "QWEN", "QWEN_THINKING", "GEMMA"])
stops = st.lists(st.sampled_from(["x", "ab", "abc", "bc", "\n\n", "</tool_call>", "é", ""]), max_size=2)
words = st.sampled_from(
    ["<think>", "</think>", write_call({"a": 1}), "<tool_call>", "abc", "\n", " ", "😀", "<|im_start|>"]
)
token_ids = st.lists(st.integers(-3, 420), max_size=40)


def numbered():
    """Call ids in order."""
    numbers = count()
    return lambda: f"call_{next(numbers)}"


def sampled_ids(name, parts):
    """Ids of a text, special tokens and all."""
    return renderer_of(name).vocabulary.encode("".join(parts))


@given(names, st.lists(words, max_size=10) | token_ids, st.booleans(), stops, st.data())
def test_deltas_join_to_the_parsed_message(name, sampled, has_tools, stop, data):
    """For any ids, cut anywhere, the deltas of the stream add up to what ``parse`` returns; neither ever raises."""
    renderer = renderer_of(name)
    ids = sampled_ids(name, sampled) if sampled and isinstance(sampled[0], str) else sampled
    options = {"tools": (TOOL,) if has_tools else (), "stop": stop}
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    chunks = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    stream = renderer.open_stream(**options, call_ids=numbered())
    deltas = [delta for chunk in chunks for delta in stream.feed(chunk)] + list(stream.finish())

    assert renderer.parse(ids, **options, call_ids=numbered()) == join_deltas(deltas)
    assert all(delta.text for delta in deltas if isinstance(delta, TextDelta))


def test_special_tokens_are_not_content():
    """End tokens and other special tokens are the model's punctuation, not its words; ``decode`` shows them."""
    renderer = renderer_of("CHATML")
    ids = renderer.vocabulary.encode("a<|im_start|>b<|im_end|>")

    assert "ab" == renderer.parse(ids).content
    assert "a<|im_start|>b<|im_end|>" == renderer.decode(ids)


def test_tags_that_are_special_tokens_are_seen_by_parsers():
    """Some vocabularies have the tags as special tokens: parsers read them all the same."""
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    renderer = create_renderer(create_tiny_tokenizer(template=templates.QWEN, more_special=tags))
    ids = renderer.vocabulary.encode(f"<think>hm</think>{write_call({'a': 1})}<|im_end|>")
    answer = renderer.parse(ids, tools=[TOOL], call_ids=numbered())

    call = ToolCall(id="call_0", name="multiply", arguments='{"a": 1}')
    assert ("hm", (call,)) == (answer.reasoning, answer.tool_calls)


def test_calls_are_parsed_only_if_tools_were_offered():
    """Without tools, what looks like a call is text."""
    renderer = renderer_of("CHATML")
    ids = sample(renderer, write_call({"a": 1}))

    assert ((), write_call({"a": 1})) == (renderer.parse(ids).tool_calls, renderer.parse(ids).content)


def test_calls_within_reasoning_are_reasoning():
    """A model may think about calling a tool without calling it."""
    renderer = renderer_of("QWEN")
    answer = renderer.parse(sample(renderer, f"<think>{write_call({})}</think>no"), tools=[TOOL])

    assert (write_call({}), "no", ()) == (answer.reasoning, answer.content, answer.tool_calls)


def test_thinking_may_be_opened_by_the_prompt():
    """Whether an answer begins inside the thinking depends on the template and its options."""
    renderer = renderer_of("QWEN_THINKING")
    answer = renderer.parse(sample(renderer, "hm\n</think>\n\nyes"))

    assert ("hm", "yes") == (answer.reasoning, answer.content)
    assert "hm" == renderer_of("QWEN").parse(sample(renderer, "hm"), template_kwargs={"enable_thinking": False}).content


def test_stop_strings_end_the_text():
    """The first to be complete ends it; what it cuts off is not said, in whatever pieces it came."""
    renderer = renderer_of("CHATML")
    ids = sample(renderer, "one two three")

    assert "one " == renderer.parse(ids, stop=["three", "two"]).content
    assert "one two three" == renderer.parse(ids, stop=["four"]).content


@given(st.permutations(["three", "two", "wo", "four"]), st.integers(0, 10))
def test_stop_string_that_ended_the_text_is_known(stop, cut):
    """The first to be complete, of several the longest, however the ids were cut; ``None`` without one."""
    renderer = renderer_of("CHATML")
    ids = sample(renderer, "one two three")
    stream, other = renderer.open_stream(stop=stop), renderer.open_stream(stop=["four"])
    for part in (ids[:cut], ids[cut:]):
        stream.feed(part)
        other.feed(part)

    assert ("two", None) == (stream.stop_sequence, other.stop_sequence)


@pytest.mark.parametrize("name", ["CHATML", "SMOLLM", "QWEN", "LLAMA", "MISTRAL", "GEMMA", "PHI", "GLM"])
@given(text=hostile_texts)
def test_text_of_messages_contains_no_special_tokens(name, text):
    """However a user, a tool or a schema spells them, special tokens of the prompt are the template's own."""
    renderer = renderer_of(name)
    special = np.array(sorted(renderer.vocabulary.special))
    tool = TOOL.__class__(name="t", description=text, parameters={text: [text]})

    def count_special(content, tools):
        return int(np.isin(renderer.render([say("user", content)], tools=tools), special).sum())

    assert count_special("x", ()) == count_special(text, ())
    assert count_special("x", [TOOL]) == count_special(text, [tool])


@pytest.mark.parametrize(
    ("messages", "options", "complaint"),
    [
        ([], {}, "no messages"),
        ([say("critic", "x")], {}, "must alternate"),
        ([say("user|>", "x")], {}, "is not a word"),
        ([say("", "x")], {}, "is not a word"),
        ([say("user", "x")], {"messages": []}, "may not be called messages"),
    ],
)
def test_conversations_that_cannot_be_rendered_are_refused(messages, options, complaint):
    """The error has the template's own words, or says what is wrong with the message."""
    with pytest.raises(RenderError, match=complaint):
        renderer_of("GEMMA").render(messages, template_kwargs=options)


def test_deep_nesting_is_refused():
    """The schema of a tool may be nested more deeply than the stack allows."""
    schema = {}
    for _ in range(100_000):
        schema = {"a": schema}
    tool = TOOL.__class__(name="t", parameters=schema)

    with pytest.raises(RenderError, match="too deeply"):
        renderer_of("QWEN").render([say("user", "x")], tools=[tool])


def test_answer_is_rendered_as_it_was_parsed():
    """An echoed answer, calls and all, makes the text that the model wrote."""
    renderer = renderer_of("QWEN")
    ids = sample(renderer, f"Let me see.\n{write_call({'a': 1, 'b': 'é'})}")
    answer = renderer.parse(ids, tools=[TOOL])
    text = renderer.decode(renderer.render([say("user", "x"), answer]))

    assert renderer.decode(ids) in text


@given(hostile_texts)
def test_raw_text_is_read_as_it_is(text):
    """Special tokens that it spells out are tokens; decoding gives the text again."""
    renderer = renderer_of("CHATML")
    ids = renderer.encode(text, is_start=False)

    assert text.replace("\ud800", "\ufffd") == renderer.decode(ids)
    assert ids.tolist() == renderer.encode(text, is_start=True).tolist()  # this tokenizer begins texts with nothing


def test_raw_text_has_the_start_tokens_of_its_tokenizer_once():
    """What comes before a text is put there once, also where the text spells it out; what would end it is left out."""
    tokenizer = create_tiny_tokenizer()
    first, second, *_ = SPECIAL_TOKENS
    start = tokenizer.convert_tokens_to_ids(first)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {second}",
        pair=f"{first} $A $B",
        special_tokens=[(first, start), (second, tokenizer.convert_tokens_to_ids(second))],
    )
    renderer = create_renderer(tokenizer)

    assert [start, *renderer.encode("hi", is_start=False)] == renderer.encode("hi", is_start=True).tolist()
    assert renderer.encode("hi", is_start=True).tolist() == renderer.encode(f"{first}hi", is_start=True).tolist()
    assert f"{first}{second}" == renderer.decode(renderer.encode(second, is_start=True))


@given(st.lists(words, max_size=6), st.integers(0, 20))
def test_answer_to_a_raw_prompt_is_plain_text(parts, cut):
    """Thinking and calls are not looked for, streamed or not; end tokens are not text."""
    renderer = renderer_of("QWEN")
    ids = sampled_ids("QWEN", parts)
    stream = renderer.open_stream(tools=(TOOL,), is_plain=True)
    deltas = [*stream.feed(ids[:cut]), *stream.feed(ids[cut:]), *stream.finish()]
    message = renderer.parse(ids, tools=(TOOL,), is_plain=True)

    assert message == join_deltas(deltas)
    assert "".join(parts).replace("<|im_start|>", "") == message.content
    assert (None, ()) == (message.reasoning, message.tool_calls)


@pytest.mark.parametrize("number", ["98765432109876543210", "-1.5", "1e400", "0.1"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_numbers_of_a_call_are_those_of_the_client(family, number):
    """Integers of any length; a number that is infinite as a float is refused if it cannot be shown."""
    call = ToolCall(id="call_0", name="f", arguments=f'{{"a": {number}}}')
    messages = [
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="assistant", tool_calls=(call,)),
        ChatMessage(role="tool", content="ok", tool_call_id="call_0"),
    ]
    renderer = FAMILIES[family].create_renderer()
    try:
        prompt = renderer.decode(renderer.render(messages, tools=[Tool(name="f")]))
    except RenderError:
        # Arguments with such a number are passed on as text, which templates that go through the arguments refuse.
        assert number == "1e400"
    else:
        assert number in prompt
