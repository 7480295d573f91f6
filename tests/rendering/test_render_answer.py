"""Given answers as ids that a model would have sampled: read back as the same message, for every family."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendering.conversations import TOOL, hostile_texts, plain_texts, say

from areal_actors.domain import ToolCall
from areal_actors.errors import RenderError
from areal_actors_testing.families import FAMILIES

QUESTION = say("user", "question")
CALL = ToolCall(id="abcdefghi", name="multiply", arguments='{"a": 1}')


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek-r1"])
@settings(max_examples=10)
@given(text=plain_texts.filter(str.isalnum) | st.just("It is 42."))
def test_text_is_what_the_family_writes(name, text):
    """With the token that ends the answer, once, as the last one; parsed, it is the text."""
    renderer = FAMILIES[name].create_renderer()

    ids = renderer.render_answer([QUESTION], say("assistant", text)).tolist()

    assert renderer.parse(ids).content == text
    assert [token_id in renderer.stop_token_ids for token_id in ids] == [False] * (len(ids) - 1) + [True]
    written = FAMILIES[name].sample(FAMILIES[name].write(text))
    assert ids[-len(written) :] == written  # some families write an empty thought first


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek-r1"])
def test_calls_are_read_back(name):
    """The ids end with the family's end of calls, and are parsed to the call."""
    renderer = FAMILIES[name].create_renderer()

    ids = renderer.render_answer([QUESTION], say("assistant", tool_calls=(CALL,)), tools=[TOOL])
    parsed = renderer.parse(ids, tools=[TOOL])

    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("multiply", '{"a": 1}')]
    assert ids[-1] in renderer.stop_token_ids
    end = FAMILIES[name].end_of_calls or FAMILIES[name].end
    assert renderer.vocabulary.special[int(ids[-1])] == end


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1", "gpt-oss", "magistral", "glm-4.5"])
def test_reasoning_is_written_before_the_answer(name):
    """Even where the template opens it in the prompt and drops it from every answer."""
    renderer = FAMILIES[name].create_renderer()

    ids = renderer.render_answer([QUESTION], say("assistant", "42", reasoning="hm"))

    assert ids.tolist() == FAMILIES[name].sample(FAMILIES[name].write("42", thought="hm"))


def test_answer_that_the_prompt_does_not_begin_is_refused():
    """A prompt that opens the reasoning needs one; the message shows both ends."""
    with pytest.raises(
        RenderError, match=r"ends a prompt with '<think>\\n', and writes this answer as '42.*reasoning_co"
    ):
        FAMILIES["deepseek-r1"].create_renderer().render_answer([QUESTION], say("assistant", "42"))


@given(text=hostile_texts)
def test_spelled_out_special_tokens_do_not_end_an_answer(text):
    """Only the end of the turn is the special token; what the answer spells out is text."""
    renderer = FAMILIES["qwen2.5"].create_renderer()

    ids = renderer.render_answer([QUESTION], say("assistant", text))

    assert [int(token_id) for token_id in ids if token_id in renderer.stop_token_ids] == [ids[-1]]
