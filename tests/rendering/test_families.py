"""The families of models: each is recognised, read, and extended or forked as its template demands."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rendering.conversations import TOOL, follow_ups, say, texts

from areal_actors.domain import ForkReason, ToolCall
from areal_actors.errors import RenderError
from areal_actors.rendering.parsers import REASONING_FORMATS, TOOL_FORMATS
from areal_actors_testing.families import FAMILIES

FORK = ForkReason.TEMPLATE_REWROTE_HISTORY
SYSTEM, QUESTION, ANSWER = say("system", "be brief"), say("user", "question"), say("assistant", "answer")
CALL = ToolCall(id="call_0f1e2d3c4b5a", name=TOOL.name, arguments='{"a": 1}')
OTHER = ToolCall(id="call_1a2b3c4d5e6f", name=TOOL.name, arguments='{"b": 2}')
ACT, ACTS = say("assistant", tool_calls=(CALL,)), say("assistant", tool_calls=(CALL, OTHER))
RESULT = say("tool", "12", tool_call_id=CALL.id, name=TOOL.name)
RESULTS = (RESULT, say("tool", "34", tool_call_id=OTHER.id, name=TOOL.name))
words = st.from_regex(r"[a-z][a-z ]{0,8}[a-z]", fullmatch=True)
each_family = pytest.mark.parametrize("name", sorted(FAMILIES))


def renderer_of(name):
    """The renderer of a family."""
    return FAMILIES[name].create_renderer()


def text_of(name, *messages, tools=()):
    """The rendered conversation."""
    return renderer_of(name).decode(renderer_of(name).render(messages, tools=tools))


def extend(name, history, *new, tools=(TOOL,)):
    """The text of the suffix, or the reason of a fork."""
    end = FAMILIES[name].sample("", has_calls=bool(history[-1].tool_calls))[-1]
    suffix = renderer_of(name).extend(history=history, new=new, end=end, tools=tools)
    return suffix if isinstance(suffix, ForkReason) else renderer_of(name).decode(suffix)


@st.composite
def answers(draw, family):
    """What a model of the family may say, and the ids."""
    calls = draw(st.lists(st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 99), max_size=2), max_size=2))
    content = draw(words) if not calls or draw(st.booleans()) else ""
    thought = draw(words) if family.thought and draw(st.booleans()) else ""
    text = family.write(content, [(TOOL.name, values) for values in calls], thought)
    return family.sample(text, has_calls=bool(calls))


@each_family
def test_family_is_recognised(name):
    """The formats of its answers are those that its template speaks, or that stand in."""
    family, renderer = FAMILIES[name], renderer_of(name)

    assert TOOL_FORMATS[family.tool_format] is renderer.tool_format
    assert (
        REASONING_FORMATS[family.reasoning_format] if family.reasoning_format else None
    ) is renderer.reasoning_format


@each_family
def test_answer_is_read(name):
    """Text, thinking and calls are told apart, and the token that ends the answer is hidden."""
    family, renderer = FAMILIES[name], renderer_of(name)
    thought = "hm" if family.thought else ""
    talk = renderer.parse(family.sample(family.write("hello", thought=thought)), tools=[TOOL])
    act = renderer.parse(
        family.sample(family.write("", [(TOOL.name, {"a": 1})], thought), has_calls=True), tools=[TOOL]
    )

    assert ("hello", thought, ()) == (talk.content, talk.reasoning or "", talk.tool_calls)
    assert (None, thought) == (act.content, act.reasoning or "")
    assert [(TOOL.name, '{"a": 1}')] == [(call.name, call.arguments) for call in act.tool_calls]


@each_family
@settings(max_examples=10)
@given(data=st.data())
def test_suffix_equals_the_rendering_of_the_whole_conversation(name, data):
    """Where a turn is extended, the whole conversation begins with the prompt and ends with the suffix, text and ids.

    What stands in between is the answer in the template's spelling, in place of what was sampled.
    """
    family, renderer = FAMILIES[name], renderer_of(name)
    tools = data.draw(st.sampled_from([(), (TOOL,)]))
    messages = [*data.draw(st.sampled_from([[], [SYSTEM], [say("developer", "hi")]])), say("user", data.draw(texts))]
    for _ in range(3):
        prompt = renderer.formatter.format(messages, tools=tools, options={})
        sampled = data.draw(answers(family))
        answer = renderer.parse(sampled, tools=tools)
        history, new = [*messages, answer], data.draw(follow_ups(answer))
        suffix = renderer.extend(
            history=history, new=new, end=data.draw(st.sampled_from([None, sampled[-1]])), tools=tools
        )
        messages = [*history, *new]
        try:
            whole = renderer.formatter.format(messages, tools=tools, options={})
        except RenderError:
            assert FORK == suffix
            return
        if not isinstance(suffix, ForkReason):
            ids = renderer.vocabulary.encode(whole)
            assert whole.startswith(prompt)
            assert ids[-len(suffix) :] == suffix.tolist()
            assert len(whole) >= len(prompt) + len(renderer.decode(suffix))
            assert all(part in whole[len(prompt) :] for part in (call.name for call in answer.tool_calls))


TURNS = {
    "question": ([SYSTEM, QUESTION, ANSWER], [QUESTION]),
    "result": ([SYSTEM, QUESTION, ACT], [RESULT]),
    "another result": ([QUESTION, ACT, RESULT, ACT], [RESULT]),
    "question after results": ([QUESTION, ACT, RESULT, ANSWER], [QUESTION]),
    "two results": ([QUESTION, ACTS], RESULTS),
}
FORKS = {
    "deepseek-r1": set(TURNS) - {"question after results"},  # drops what the prompt has opened
    "glm-4.5": set(TURNS),  # every answer has a block of thinking
    "gpt-oss": {"question", "question after results", "two results"},  # another end token; one call only
    "mistral-v3": {"question", "question after results"},  # the tools move
    "deepseek-v3": {"another result"},  # results are closed only where an answer follows
    "hermes-3": {"another result", "question after results"},  # the last result looks different
    "llama-3.1": {"two results"},  # one call only
    "llama-3.2": {"two results"},
}


@each_family
@pytest.mark.parametrize("turn", TURNS)
def test_extension_is_faithful_or_a_fork(name, turn):
    """The turns of every agent are extended but where the template rewrites what precedes them."""
    history, new = TURNS[turn]
    suffix = extend(name, history, *new)

    assert (turn in FORKS.get(name, ())) == (suffix == FORK)
    if suffix != FORK:
        assert text_of(name, *history, *new, tools=[TOOL]).endswith(suffix)


def thinking(content="a", **more):
    """An answer that was thought about."""
    return say("assistant", content, reasoning="hm", **more)


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1", "glm-4.5", "gpt-oss"])
def test_dropped_thoughts_are_forks(name):
    """The next question makes these templates forget what was thought before."""
    assert FORK == extend(name, [QUESTION, thinking()], QUESTION)


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "gpt-oss", "magistral"])
def test_thoughts_of_a_tool_loop_are_kept(name):
    """Until the next question they stand where they were sampled."""
    act = thinking(None, tool_calls=(CALL,))

    assert FORK != extend(name, [QUESTION, act], RESULT)
    assert FORK != extend(name, [QUESTION, act, RESULT, act], RESULT)


@pytest.mark.parametrize("turn", TURNS)
def test_empty_block_of_thinking_is_extended(turn):
    """A template that writes the block into every answer changes none that was sampled with it."""
    (*history, answer), new = TURNS[turn]
    history = [*history, evolve(answer, reasoning="")]
    suffix = extend("glm-4.5", history, *new)

    assert FORK != suffix
    assert text_of("glm-4.5", *history, *new, tools=[TOOL]).endswith(suffix)


@pytest.mark.parametrize(
    ("name", "end", "is_fork"),
    [
        ("glm-4.5", "<|observation|>", False),
        ("glm-4.5", "<|user|>", True),
        ("gemma-4", "<|tool_response>", False),
        ("gemma-4", "<turn|>", True),
        ("llama-3.1", "<|eot_id|>", False),
        ("llama-3.1", "<|eom_id|>", False),
    ],
)
def test_answer_that_opened_another_turn_is_a_fork(name, end, is_fork):
    """The sampled end must be the token that opens the next turn; an end of turn may be spelled otherwise."""
    renderer = renderer_of(name)
    ids = {text: token_id for token_id, text in renderer.vocabulary.special.items()}
    act = evolve(ACT, reasoning="" if name == "glm-4.5" else None)
    suffix = renderer.extend(history=[QUESTION, act], new=[RESULT], end=ids[end], tools=[TOOL])

    assert is_fork == isinstance(suffix, ForkReason)


def test_ids_of_calls_are_shortened_where_the_template_insists():
    """Nine letters and digits, the same for a call and its result; good ids are left alone."""
    text = text_of("mistral-v3", QUESTION, ACT, RESULT)
    short = ToolCall(id="abcDEF012", name=TOOL.name, arguments="{}")

    call_id = text.partition('"id": "')[2][:9]
    assert call_id.isalnum()
    assert f'"call_id": "{call_id}"' in text
    assert '"id": "abcDEF012"' in text_of("mistral-v3", QUESTION, say("assistant", tool_calls=(short,)))
    assert FORK != extend("mistral-v3", [QUESTION, ACT], RESULT)


def test_preamble_beside_thinking_and_a_call_is_kept():
    """A template that has room for one of them gets both as one."""
    act = say("assistant", "I look.", reasoning="hm", tool_calls=(CALL,))

    assert "<|channel|>analysis<|message|>hm\n\nI look.<|end|>" in text_of("gpt-oss", QUESTION, act, RESULT)
    assert FORK != extend("gpt-oss", [QUESTION, act], RESULT)
