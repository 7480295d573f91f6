"""Answers of the session manager: exact tokens from turn to turn, deltas that join to them, forms that are demanded."""

from __future__ import annotations

import anyio
import pytest
from tests.stacks.callers import Asking, ids
from tests.stacks.inference_stack import echo_of, encode, open_inference_stack, renderer, say

from areal_actors.domain import (
    Answer,
    AnswerStarted,
    FinishReason,
    InteractionStatus,
    JsonText,
    TextDelta,
    Tool,
    ToolCallStarted,
    ToolChoice,
)
from areal_actors.errors import UnsupportedParameter
from areal_actors.testing.engines import EchoEngine, echo_logprob, script_answers

pytestmark = pytest.mark.anyio


# -------------------------------------------------------------------------------------------------------- tokens


async def test_second_turn_extends_the_exact_tokens_of_the_first():
    """No tokenizer would have chosen the sampled ids."""
    letters = [i for character in "42" for i in encode(character, is_closed=False)]
    async with open_inference_stack(script_answers([*letters, 2], encode("yes"))) as inference:
        session = (await inference.open()).session
        (first,) = await inference.complete(session, say("what?"))
        (second,) = await inference.complete(session, (*say("what?"), echo_of(first), *say("sure?")))
        record = await inference.record(session)
    asked = [ids(request.prompt) for request in inference.engine.requests]
    known = [*asked[0], *letters, 2]

    assert asked[0] == ids(renderer().render(say("what?"), tools=(), template_kwargs={}))
    assert "42" == first.message.content
    assert known == asked[1][: len(known)]
    assert record.interactions[1].token_parent == first.interaction
    assert asked[1][len(known) :] == ids(record.interactions[1].prompt_suffix)
    assert (len(asked[1]), len(second.completion.token_ids)) == (
        second.usage.prompt_tokens,
        second.usage.completion_tokens,
    )


async def test_requests_of_a_session_share_a_routing_key():
    async with open_inference_stack() as inference:
        sessions = [(await inference.open()).session for _ in range(2)]
        for session in (*sessions, *sessions):
            await inference.complete(session, say("what?"), num_choices=2)
    keys = [request.routing_key for request in inference.engine.requests]

    assert [name for name in (*sessions, *sessions) for _ in range(2)] == keys


async def test_record_holds_what_the_engine_sampled():
    """Ids, log-probabilities, versions and the finish reason are the same."""
    async with open_inference_stack(engine=EchoEngine(lambda _: encode("42"), version=7)) as inference:
        session = (await inference.open()).session
        (answer,) = await inference.complete(session, say("what?"))
        (interaction,) = (await inference.record(session)).interactions
    completion = interaction.completion

    assert answer.interaction == interaction.id == inference.engine.requests[0].id
    assert completion is not None
    assert encode("42") == ids(completion.token_ids)
    assert [echo_logprob(i) for i in encode("42")] == completion.logprobs.tolist()
    assert {7} == set(ids(completion.versions))
    assert FinishReason.STOP == completion.finish
    assert (InteractionStatus.COMPLETED, "42") == (interaction.status, interaction.output.content)


async def test_choices_are_siblings_with_different_keys():
    """They have one parent."""
    async with open_inference_stack(script_answers(encode("a"), encode("b"), encode("c"))) as inference:
        session = (await inference.open()).session
        answers = await inference.complete(session, say("pick"), num_choices=3)
        turns = (await inference.record(session)).interactions
    keys = [request.key for request in inference.engine.requests]

    assert ["a", "b", "c"] == sorted(answer.message.content for answer in answers)
    assert [answer.interaction for answer in answers] == [turn.id for turn in turns]
    assert [f"{turns[0].id}-1", f"{turns[0].id}-2"] == [turn.id for turn in turns[1:]]
    assert {(None, None)} == {(turn.parent, turn.token_parent) for turn in turns}
    assert 3 == len(set(keys))


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_deltas_join_to_the_answer(num_choices: int):
    """This holds for each choice."""
    async with open_inference_stack(script_answers(encode("one two"), encode("three"), encode("four"))) as inference:
        session = (await inference.open()).session
        asking = Asking()
        await asking.stream(inference, session, num_choices=num_choices)
        turns = (await inference.record(session)).interactions
    answers = [item for item in asking.heard if isinstance(item, Answer)]
    starts = [item for item in asking.heard if isinstance(item, AnswerStarted)]

    assert asking.error is None
    assert [(turn.id, index) for index, turn in enumerate(turns)] == [(s.interaction, s.choice) for s in starts]
    assert {"one two", "three", "four"} >= {answer.message.content for answer in answers}
    for index, answer in enumerate(answers):
        deltas = [item for item in asking.heard if getattr(item, "choice", None) == index and item not in starts]
        assert answer.message.content == "".join(delta.text for delta in deltas)


async def test_streamed_tool_call_keeps_its_id():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with open_inference_stack(lambda _: encode(call)) as inference:
        session = (await inference.open()).session
        asking = Asking()
        await asking.stream(inference, session, tools=(Tool(name="add"),))
    (started,) = [item for item in asking.heard if isinstance(item, ToolCallStarted)]
    answer = asking.heard[-1]

    assert isinstance(answer, Answer)
    assert [(started.id, "add")] == [(made.id, made.name) for made in answer.message.tool_calls]


async def test_deltas_are_sent_while_tokens_are_sampled():
    engine = EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with open_inference_stack(engine=engine) as inference, anyio.create_task_group() as tasks:
        session = (await inference.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.stream(inference, session))
        await anyio.wait_all_tasks_blocked()
        assert [AnswerStarted] == [type(item) for item in asking.heard]

        engine.release(len(encode("one", is_closed=False)))
        await anyio.wait_all_tasks_blocked()
        assert "one" == "".join(item.text for item in asking.heard if isinstance(item, TextDelta))
        engine.release(99)


async def test_answer_ends_at_the_context_length():
    prompt = len(renderer().render(say("what?"), tools=(), template_kwargs={}))
    async with open_inference_stack(
        engine=EchoEngine(lambda _: encode("1" * 20), context_length=prompt + 4)
    ) as inference:
        session = (await inference.open()).session
        (answer,) = await inference.complete(session, say("what?"))

    assert (4, FinishReason.LENGTH) == (len(answer.completion.token_ids), answer.completion.finish)


# ---------------------------------------------------------------------------------------------- forms of answers


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": (Tool(name="f"),), "tool_choice": ToolChoice.REQUIRED}, "tool_choice"),
        ({"tools": (Tool(name="f"),), "tool_choice": "f"}, "tool_choice"),
        ({"response_format": JsonText()}, "response_format"),
    ],
)
async def test_grammar_is_refused_by_an_engine_without_grammars(options, param):
    """The session records nothing."""
    async with open_inference_stack() as inference:
        opened = await inference.open()
        with pytest.raises(UnsupportedParameter, match=param) as caught:
            await inference.complete(opened.session, say("hi"), **options)
        record = await inference.record(opened.session)

    assert caught.value.param == param
    assert record.interactions == ()
    assert inference.engine.requests == []


async def test_engine_receives_the_grammar_of_the_renderer():
    """A strict tool that may be called has none."""
    tool = Tool(name="f", is_strict=True)
    async with open_inference_stack(engine=EchoEngine(lambda _: encode("42"), has_grammars=True)) as inference:
        opened = await inference.open()
        await inference.complete(opened.session, say("hi"), tools=(tool,), tool_choice=ToolChoice.REQUIRED)
        await inference.complete(opened.session, say("hi"), tools=(tool,))

    demanded, free = inference.engine.requests
    assert demanded.grammar == renderer().constrain(tools=(tool,), tool_choice=ToolChoice.REQUIRED)
    assert free.grammar is None


async def test_grammar_that_the_engine_refuses_fails_the_interaction():
    """The session continues."""

    class Refusing(EchoEngine):
        def generate(self, request):
            if request.grammar is not None:
                raise UnsupportedParameter("no such form")
            return super().generate(request)

    async with open_inference_stack(engine=Refusing(lambda _: encode("42"), has_grammars=True)) as inference:
        opened = await inference.open()
        with pytest.raises(UnsupportedParameter, match="no such form"):
            await inference.complete(opened.session, say("hi"), response_format=JsonText())
        await inference.complete(opened.session, say("hi"))
        record = await inference.record(opened.session)

    assert [i.status for i in record.interactions] == [InteractionStatus.FAILED, InteractionStatus.COMPLETED]
