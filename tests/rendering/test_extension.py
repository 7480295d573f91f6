"""A turn extends its parent's exact ids, or says that the template forbids it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.rendering import templates
from tests.rendering.conversations import TOOL, answers, follow_ups, renderer_of, sample, say, texts
from tokenizers import AddedToken

from areal_actors.domain import ForkReason, Tool, ToolCall
from areal_actors.errors import RenderError
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.rendering import create_renderer

FORK = ForkReason.TEMPLATE_REWROTE_HISTORY
CALL = ToolCall(id="call00000", name="multiply", arguments='{"a": 1}')
RESULT = say("tool", "12", tool_call_id=CALL.id)
SYSTEM, QUESTION, ANSWER = say("system", "be brief"), say("user", "question"), say("assistant", "answer")
ACT = say("assistant", tool_calls=(CALL,))


def extend(source, history, *new, is_cut=False, **more):
    """The suffix of a renderer, or of a template by its name, after an answer with the usual end."""
    renderer = renderer_of(source) if isinstance(source, str) else source
    end = None if is_cut else renderer.stop_token_ids[0]
    return renderer.extend(history=history, new=new, end=end, **more)


@pytest.mark.parametrize("name", ["CHATML", "SMOLLM", "QWEN", "GEMMA", "GLM", "PHI", "LLAMA"])
@given(data=st.data())
def test_extension_equals_rendering_anew(name, data):
    """Turn for turn, parent ids + sampled ids + suffix are the ids of the whole, where samples are canonical."""
    renderer = renderer_of(name)
    has_tools = renderer.tool_format is not None and data.draw(st.booleans())
    tools = (TOOL,) if has_tools else ()
    messages = [*data.draw(st.sampled_from([[], [SYSTEM]] if name != "GEMMA" else [[]])), say("user", data.draw(texts))]
    ids = renderer.render(messages, tools=tools)
    for _ in range(3):
        sampled = sample(renderer, data.draw(answers(has_tools=has_tools, can_think=name == "QWEN")))
        text = renderer.formatter.format(messages, tools=tools, options={})
        body = renderer.vocabulary.guard(renderer.decode(sampled[:-1]))
        assume(renderer.vocabulary.encode(text + body) == [*ids, *sampled[:-1]])
        answer = renderer.parse(sampled, tools=tools)
        new = data.draw(follow_ups(answer))
        suffix = extend(renderer, [*messages, answer], *new, tools=tools)
        messages += [answer, *new]
        anew = renderer.render(messages, tools=tools)
        ids = anew if isinstance(suffix, ForkReason) else np.concatenate([ids, sampled, suffix])

        assert anew.tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("name", "history", "new"),
    [
        ("CHATML", [QUESTION, ANSWER], [QUESTION]),
        ("SMOLLM", [QUESTION, ACT], [RESULT, RESULT]),
        ("SMOLLM", [SYSTEM, QUESTION, ANSWER], [SYSTEM, QUESTION]),
        ("QWEN", [QUESTION, ACT], [RESULT, RESULT]),
        ("QWEN", [QUESTION, say("assistant", reasoning="hm", tool_calls=(CALL,))], [RESULT]),
        ("QWEN", [QUESTION, say("assistant", "a", reasoning="hm"), QUESTION, ANSWER], [QUESTION]),
        ("LLAMA", [SYSTEM, QUESTION, ANSWER], [QUESTION]),
        ("LLAMA", [QUESTION, ACT], [RESULT]),
        ("MISTRAL", [QUESTION, ANSWER], [QUESTION]),
        ("MISTRAL", [QUESTION, ACT], [RESULT, RESULT]),
        ("MISTRAL", [SYSTEM, QUESTION, ANSWER], [QUESTION]),
        ("MISTRAL", [QUESTION, say("assistant", "hm", tool_calls=(CALL,))], [RESULT]),
        ("MISTRAL", [QUESTION, ACT], [RESULT, QUESTION]),
        ("GEMMA", [QUESTION, ACT], [RESULT]),
        ("GEMMA", [QUESTION, ACT], [RESULT, QUESTION]),
        ("GEMMA", [QUESTION, ANSWER], [SYSTEM, QUESTION]),
        ("GLM", [SYSTEM, QUESTION, ANSWER], [QUESTION]),
        ("PHI", [SYSTEM, QUESTION, ANSWER], [QUESTION]),
        ("CHATML", [QUESTION, say("assistant", "<think>hm</think>a")], [QUESTION]),
        ("CHATML", [QUESTION, say("assistant", "")], [QUESTION]),
    ],
)
def test_faithful_shapes_are_extended(name, history, new):
    """What the template leaves alone is extended: no branch where none is needed."""
    assert not isinstance(extend(name, history, *new), ForkReason)


@pytest.mark.parametrize(
    ("name", "history", "new"),
    [
        ("QWEN", [QUESTION, say("assistant", "a", reasoning="hm")], [QUESTION]),
        ("QWEN", [QUESTION, say("assistant", reasoning="hm", tool_calls=(CALL,)), RESULT, ANSWER], [QUESTION]),
        ("QWEN", [QUESTION, say("assistant", "a", reasoning="")], [QUESTION]),
        ("QWEN", [QUESTION, ANSWER], []),
        ("QWEN_THINKING", [QUESTION, ANSWER], [QUESTION]),
        ("GLM", [QUESTION, ANSWER], [SYSTEM, QUESTION]),
        ("GLM", [QUESTION, ACT], [say("system", ""), QUESTION]),
        ("GLM", [QUESTION, ANSWER], []),
        ("BARE", [QUESTION, ANSWER], [QUESTION]),
        ("CHATML", [QUESTION, say("assistant", "a", reasoning="hm")], [QUESTION]),
    ],
)
def test_rewritten_shapes_are_forks(name, history, new):
    """A template that drops, moves or adds something earlier makes a branch, for the shapes concerned."""
    assert FORK == extend(name, history, *new)


def test_tools_that_move_are_a_fork():
    """A template that puts the tools before the last question forks at a new question, not at a tool's result."""
    assert FORK == extend("MISTRAL", [QUESTION, ANSWER], QUESTION, tools=[TOOL])
    assert not isinstance(extend("MISTRAL", [QUESTION, ACT], RESULT, tools=[TOOL]), ForkReason)


def test_template_options_are_part_of_the_question():
    """An option that changes the generation prompt is judged on its own."""
    plain = extend("QWEN", [QUESTION, ANSWER], QUESTION)
    thoughtless = extend("QWEN", [QUESTION, ANSWER], QUESTION, template_kwargs={"enable_thinking": False})

    assert not isinstance(plain, ForkReason)
    assert FORK == thoughtless


def test_turn_cut_by_length_is_closed_by_the_suffix():
    """Sampled ids without a stop token are followed by the end of turn; with one they are not."""
    renderer = renderer_of("CHATML")
    cut = extend("CHATML", [QUESTION, ANSWER], QUESTION, is_cut=True)
    closed = extend("CHATML", [QUESTION, ANSWER], QUESTION)

    assert "<|im_end|>\n<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n" == renderer.decode(cut)
    assert cut[1:].tolist() == closed.tolist()


def test_end_of_turn_that_swallows_a_line_break_keeps_doing_so():
    """A special token that strips what follows strips it in suffixes as well."""
    tokenizer = create_tiny_tokenizer(template=templates.PHI, more_special=("<|user|>", "<|assistant|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", rstrip=True)]})
    renderer = create_renderer(tokenizer)
    prompt, sampled = renderer.render([QUESTION]), sample(renderer, "answer")
    suffix = extend(renderer, [QUESTION, ANSWER], QUESTION)

    assert renderer.render([QUESTION, ANSWER, QUESTION]).tolist() == [*prompt, *sampled, *suffix]


def test_suffix_contains_neither_history_nor_default_system_prompt():
    """Only what is new is rendered, whatever the template puts first."""
    suffix = extend("SMOLLM", [QUESTION, ACT], RESULT, tools=[TOOL])

    text = "\n<|im_start|>tool\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text == renderer_of("SMOLLM").decode(suffix)


def test_refused_suffix_forks_and_full_rendering_explains():
    """An extension that cannot be rendered is a fork; rendering it says why."""
    new = say("critic", "again")

    assert FORK == extend("MISTRAL", [QUESTION, ANSWER], new)
    with pytest.raises(RenderError, match="role critic is not known"):
        renderer_of("MISTRAL").render([QUESTION, ANSWER, new])


def test_extension_with_a_refused_call_id_is_a_fork():
    """A template that is strict about something is not fooled by a verdict that was found with other words."""
    calls = "{%- for m in messages %}{% for call in m.tool_calls or [] %}"
    refusal = "{%- if call.id == 'odd' %}{{ raise_exception('odd') }}{% endif %}{% endfor %}{% endfor %}"
    renderer = create(calls + refusal + templates.QWEN)
    odd = ToolCall(id="odd", name="multiply", arguments="{}")
    history = [QUESTION, say("assistant", tool_calls=(CALL,))]

    assert not isinstance(extend(renderer, history, RESULT), ForkReason)
    assert FORK == extend(renderer, [QUESTION, say("assistant", tool_calls=(odd,))], RESULT)


def create(source, *more_special):
    """A renderer of a template that only one test has."""
    return create_renderer(create_tiny_tokenizer(template=source, more_special=more_special))


def test_calls_that_are_not_closed_cannot_be_extended():
    """The end of some later turn is not taken for the end of the answer, which would lose the result in between."""
    message = "'<|im_start|>' + m.role + '\n' + m.content + (m.tool_calls | tojson if m.tool_calls else '<|im_end|>')"
    renderer = create("{% for m in messages %}{{ " + message + " }}{% endfor %}{{ '<|im_start|>assistant\n' }}")

    assert renderer.formatter.adaptation.format is not None  # for the tools; the calls are the template's own
    assert FORK == extend(renderer, [QUESTION, ACT], RESULT)
    assert FORK == extend(renderer, [QUESTION, ACT])


def test_end_of_turn_that_melts_into_another_token_is_a_fork():
    """The suffix could not be cut behind the end of turn then."""
    renderer = create(templates.PHI.replace("\\n", ""), "<|end|>", "<|user|>", "<|end|><|system|>")

    assert not isinstance(extend(renderer, [QUESTION, ANSWER], QUESTION), ForkReason)
    assert FORK == extend(renderer, [QUESTION, ANSWER], SYSTEM)


def test_template_that_refuses_long_conversations_is_not_extended():
    """What some history of the same shape makes impossible is not promised."""
    refusal = "{%- if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}"
    renderer = create(refusal + templates.CHATML)

    assert FORK == extend(renderer, [QUESTION, ANSWER], QUESTION)


def test_template_that_refuses_everything_can_be_loaded():
    """It refuses at the first request, in its own words, and can still read."""
    renderer = create("{# </think> #}{{ raise_exception('not today') }}")

    assert "a" == renderer.parse(sample(renderer, "a")).content
    assert FORK == extend(renderer, [QUESTION, ANSWER], QUESTION)
    with pytest.raises(RenderError, match="not today"):
        renderer.render([QUESTION])


def test_history_must_end_with_an_answer():
    """A caller's mistake is named."""
    with pytest.raises(ValueError, match="must end with the assistant's answer"):
        extend("CHATML", [QUESTION], QUESTION)


@given(st.lists(st.sampled_from([SYSTEM, QUESTION, ANSWER, ACT, RESULT]), max_size=8))
def test_verdicts_are_bounded_and_never_raise(new):
    """Any sequence of new messages gets ids or a reason."""
    suffix = extend("QWEN", [QUESTION, ANSWER], *new, tools=[Tool(name="t")])

    assert isinstance(suffix, np.ndarray | ForkReason)
