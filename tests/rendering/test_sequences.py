"""Any sequence of messages: all families render every text of it, whatever an agent sends."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendering.conversations import TOOL, say
from tests.rendering.test_extension import create, extend

from areal_actors.domain import ForkReason, ToolCall
from areal_actors.errors import RenderError
from areal_actors_testing.families import FAMILIES

each_family = pytest.mark.parametrize("name", sorted(FAMILIES))
# Arguments as clients write them, and a call that was cut while it was streamed.
ARGUMENTS = ("", "null", "{}", " ", '{"a": "%"}', '{"a": "%", "b": [1]}', '["%"]', '"%"', '{"a": "%', "%")


@st.composite
def sequences(draw, max_size=7):
    """Messages in any order, with results that name a call before them, another id, or none."""
    messages, ids = [], ["unknown"]
    for number in range(draw(st.integers(1, max_size))):
        role = draw(st.sampled_from(["system", "developer", "user", "user", "assistant", "assistant", "tool", "tool"]))
        text = draw(st.sampled_from([f"words {number:02}.", f"words {number:02}.", ""]))
        message = say(role, text, tool_call_id=draw(st.sampled_from([None, *ids])) if role == "tool" else None)
        if role == "assistant":
            written = draw(st.lists(st.sampled_from(ARGUMENTS), max_size=3))
            new = [draw(st.sampled_from(["", f"call_{number}{place}"])) for place in range(len(written))]
            ids += [call_id for call_id in new if call_id]
            calls = tuple(
                ToolCall(id=call_id, name=TOOL.name, arguments=text.replace("%", f"value {number:02}{place}."))
                for place, (call_id, text) in enumerate(zip(new, written, strict=True))
            )
            thought = draw(st.sampled_from([None, "", "thought"]))
            message = evolve(message, content=text or None, tool_calls=calls, reasoning=thought)
        messages.append(message)
    return messages


def values_of(message):
    """The values in the arguments of calls that a prompt has to show."""
    return [part for call in message.tool_calls for part in call.arguments.split('"') if part.startswith("value")]


@each_family
@settings(max_examples=25)
@given(messages=sequences(), tools=st.sampled_from([(), (TOOL,)]))
def test_prompt_has_the_texts_of_all_messages_in_their_order(name, messages, tools):
    """Nothing is left out in silence, and nothing is refused; only results are sorted by their calls."""
    renderer = FAMILIES[name].create_renderer()
    text = renderer.decode(renderer.render(messages, tools=tools))
    talk = [text.find(message.content) for message in messages if message.content and message.role != "tool"]

    assert -1 not in talk
    assert talk == sorted(talk)
    assert all(message.content in text for message in messages if message.content)
    assert all(value in text for message in messages for value in values_of(message))


@each_family
@settings(max_examples=15)
@given(history=sequences(max_size=4), calls=st.integers(0, 2), new=sequences(max_size=3))
def test_suffix_has_the_texts_of_all_new_messages(name, history, calls, new):
    """What follows an answer is never shortened: it is extended with all of it, or rendered anew."""
    renderer = FAMILIES[name].create_renderer()
    ids = [f"call_{place}" for place in range(calls)]
    acts = tuple(ToolCall(id=call_id, name=TOOL.name, arguments='{"a": 1}') for call_id in ids)
    new = [*(say("tool", f"result {call_id}.", tool_call_id=call_id) for call_id in ids), *new]
    answer = say("assistant", None if calls else "answer", tool_calls=acts)
    suffix = extend(renderer, [*history, answer], *new, is_cut=True, tools=(TOOL,))
    if not isinstance(suffix, ForkReason):
        text = renderer.decode(suffix)

        assert all(message.content in text for message in new if message.content)
        assert all(value in text for message in new for value in values_of(message))


def text_of(name, *messages, tools=()):
    """The rendered conversation of a family."""
    renderer = FAMILIES[name].create_renderer()
    return renderer.decode(renderer.render(messages, tools=tools))


def call(call_id, text):
    """A call."""
    return ToolCall(id=call_id, name=TOOL.name, arguments=json.dumps({"a": text}))


QUESTION, REMINDER = say("user", "question"), say("user", "reminder")
RESULTS = (say("tool", "second", tool_call_id="call_b"), say("tool", "first", tool_call_id="call_a"))


@pytest.mark.parametrize("name", ["llama-3.1", "llama-3.2", "gpt-oss"])
def test_several_calls_are_rendered_one_by_one_where_a_message_takes_one(name):
    """Each before its own result, whatever the order in which the results come."""
    acts = say("assistant", tool_calls=(call("call_a", "1st"), call("call_b", "2nd")))
    text = text_of(name, QUESTION, acts, *RESULTS, tools=[TOOL])

    assert sorted(["1st", "first", "2nd", "second"], key=text.rindex) == ["1st", "first", "2nd", "second"]


@pytest.mark.parametrize("name", ["hermes-3", "qwen3", "deepseek-v3"])
def test_results_come_in_the_order_of_their_calls(name):
    """Most templates show no ids, so that their place tells which call they answer."""
    acts = say("assistant", tool_calls=(call("call_a", "1st"), call("call_b", "2nd")))
    text = text_of(name, QUESTION, acts, *RESULTS)

    assert text.index("first") < text.index("second")


def test_adjacent_messages_of_a_role_are_joined_where_roles_alternate():
    """A reminder behind a result, a second question, a late system message."""
    act = say("assistant", tool_calls=(call("call_a", "1"),))
    system = say("system", "late")
    text = text_of("gemma-3", QUESTION, act, say("tool", "12", tool_call_id="call_a"), REMINDER, system)

    assert "12\n</tool_response>\n\nreminder\n\nlate<end_of_turn>" in text


def test_question_behind_a_result_follows_an_empty_answer_where_calls_do_not_alternate():
    """Mistral's templates do not count calls and results."""
    act = say("assistant", tool_calls=(call("call_a", "1"),))
    text = text_of("mistral-v3", QUESTION, act, say("tool", "12", tool_call_id="call_a"), REMINDER)

    assert text.endswith("[/TOOL_RESULTS]</s>[INST]reminder[/INST]")


def test_text_beside_a_call_is_a_message_where_the_template_drops_it():
    """Before the call, as it was sampled."""
    act = say("assistant", "Let me see.", tool_calls=(call("call_a", "1"),))

    assert "Let me see.<|im_end|>\n<|im_start|>assistant\n<tool_call>" in text_of("hermes-3", QUESTION, act)


@pytest.mark.parametrize("arguments", ['{"a": "12', '["12"]', '{"a": 12e400}', '{"a": {"b": -12e999}}'])
@pytest.mark.parametrize("name", ["glm-4.5", "qwen3-coder"])
def test_malformed_arguments_are_one_argument_where_the_template_needs_an_object(name, arguments):
    """The text of a call that was cut, or has a number that is infinite as a float, is shown to the model."""
    cut = ToolCall(id="call_a", name=TOOL.name, arguments=arguments)

    assert arguments in text_of(name, QUESTION, say("assistant", tool_calls=(cut,)), tools=[TOOL])


def test_message_that_a_template_drops_is_refused():
    """Whatever its order: the error names the message."""
    renderer = create("{% for m in messages %}{% if loop.index < 3 %}{{ m.content }}\n{% endif %}{% endfor %}")

    assert "hello" in renderer.decode(renderer.render([say("user", "hello")]))
    with pytest.raises(RenderError, match="leaves out message 2 \\(of role user\\) of 3"):
        renderer.render([say("user", "hello"), say("assistant", "hi"), say("user", "and this?")])
