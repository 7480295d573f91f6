"""The session manager: exact tokens from turn to turn, and every request ends once, whatever becomes of it."""

from __future__ import annotations

import anyio
import pytest
from tests.actors.house import House, echo_of, encode, open_house, renderer, say

from areal_actors.actors.sessions import SessionsConfig
from areal_actors.cache import SessionSettings, export_trajectories
from areal_actors.cache.export import STYLES
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    CompletionRequest,
    Credential,
    FinishReason,
    InteractionStatus,
    Ints,
    JsonText,
    PauseMode,
    Sampling,
    SessionId,
    TextDelta,
    Tool,
    ToolCallStarted,
    ToolChoice,
    Untrained,
    UntrainedReason,
)
from areal_actors.errors import (
    Conflict,
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    NotFound,
    RenderError,
    RewardError,
    SessionEnded,
    Unauthorized,
    Unavailable,
    UnsupportedParameter,
)
from areal_actors.messages import (
    ClaimPermit,
    DescribeCapacity,
    EndSession,
    ForgetSession,
    PauseGeneration,
    SetReward,
    StreamComplete,
)
from areal_actors.testing.engines import EchoEngine, echo_logprob, script_answers

pytestmark = pytest.mark.anyio


class Asking:
    """A request on its way in a task of its own: what it ended in, and a scope to hang up with."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.answers: tuple[Answer, ...] = ()
        self.error: Exception | None = None
        self.heard: list[object] = []

    async def complete(self, house: House, session: SessionId, **options: object) -> None:
        with self.scope:
            try:
                self.answers = await house.complete(session, say("why?"), **options)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.error = error

    async def stream(self, house: House, session: SessionId, **options: object) -> None:
        with self.scope:
            try:
                async with house.sessions.stream(stream_request(session, **options)) as items:
                    async for item in items:
                        self.heard.append(item)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                self.error = error


def stream_request(session: SessionId, **options: object) -> StreamComplete:
    request = CompletionRequest(messages=say("why?"), sampling=Sampling(max_new_tokens=64), **options)
    return StreamComplete(credential=Credential(session=session), request=request)


async def ask_in_vain(house: House, session: SessionId, **options: object) -> Exception:
    asking = Asking()
    await asking.complete(house, session, **options)
    assert asking.error is not None
    return asking.error


def ids(array: Ints) -> list[int]:
    return [int(i) for i in array]


# ------------------------------------------------------------------------------------------------------ answers


async def test_a_second_turn_extends_the_exact_tokens_of_the_first():
    """Prompt, sampled ids and suffix, although the sampled ids are none that a tokenizer would have chosen."""
    letters = [i for character in "42" for i in encode(character, is_closed=False)]
    async with open_house(script_answers([*letters, 2], encode("yes"))) as house:
        session = (await house.open()).session
        (first,) = await house.complete(session, say("what?"))
        (second,) = await house.complete(session, (*say("what?"), echo_of(first), *say("sure?")))
        record = await house.record(session)
    asked = [ids(request.prompt) for request in house.engine.requests]
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


async def test_the_requests_of_a_session_have_one_routing_key():
    """Whatever is asked in it; another session has another."""
    async with open_house() as house:
        sessions = [(await house.open()).session for _ in range(2)]
        for session in (*sessions, *sessions):
            await house.complete(session, say("what?"), num_choices=2)
    keys = [request.routing_key for request in house.engine.requests]

    assert [name for name in (*sessions, *sessions) for _ in range(2)] == keys


async def test_what_the_engine_sampled_is_what_is_remembered():
    """Ids, log-probabilities, versions and the reason of the end, from the engine to the record."""
    async with open_house(engine=EchoEngine(lambda _: encode("42"), version=7)) as house:
        session = (await house.open()).session
        (answer,) = await house.complete(session, say("what?"))
        (interaction,) = (await house.record(session)).interactions
    completion = interaction.completion

    assert answer.interaction == interaction.id == house.engine.requests[0].id
    assert completion is not None
    assert encode("42") == ids(completion.token_ids)
    assert [echo_logprob(i) for i in encode("42")] == completion.logprobs.tolist()
    assert {7} == set(ids(completion.versions))
    assert FinishReason.STOP == completion.finish
    assert (InteractionStatus.COMPLETED, "42") == (interaction.status, interaction.output.content)


async def test_choices_are_siblings_with_random_numbers_of_their_own():
    """``n`` answers of one prompt: one parent, different keys; the first has the id that the client sees."""
    async with open_house(script_answers(encode("a"), encode("b"), encode("c"))) as house:
        session = (await house.open()).session
        answers = await house.complete(session, say("pick"), num_choices=3)
        turns = (await house.record(session)).interactions
    keys = [request.key for request in house.engine.requests]

    assert ["a", "b", "c"] == sorted(answer.message.content for answer in answers)
    assert [answer.interaction for answer in answers] == [turn.id for turn in turns]
    assert [f"{turns[0].id}-1", f"{turns[0].id}-2"] == [turn.id for turn in turns[1:]]
    assert {(None, None)} == {(turn.parent, turn.token_parent) for turn in turns}
    assert 3 == len(set(keys))


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_deltas_join_to_the_answer(num_choices: int):
    """Each choice begins, speaks and ends; what was said is what is remembered."""
    async with open_house(script_answers(encode("one two"), encode("three"), encode("four"))) as house:
        session = (await house.open()).session
        asking = Asking()
        await asking.stream(house, session, num_choices=num_choices)
        turns = (await house.record(session)).interactions
    answers = [item for item in asking.heard if isinstance(item, Answer)]
    starts = [item for item in asking.heard if isinstance(item, AnswerStarted)]

    assert asking.error is None
    assert [(turn.id, index) for index, turn in enumerate(turns)] == [(s.interaction, s.choice) for s in starts]
    assert {"one two", "three", "four"} >= {answer.message.content for answer in answers}
    for index, answer in enumerate(answers):
        deltas = [item for item in asking.heard if getattr(item, "choice", None) == index and item not in starts]
        assert answer.message.content == "".join(delta.text for delta in deltas)


async def test_a_streamed_tool_call_keeps_its_id():
    """The id that the client read in a delta is the id in the answer."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with open_house(lambda _: encode(call)) as house:
        session = (await house.open()).session
        asking = Asking()
        await asking.stream(house, session, tools=(Tool(name="add"),))
    (started,) = [item for item in asking.heard if isinstance(item, ToolCallStarted)]
    answer = asking.heard[-1]

    assert isinstance(answer, Answer)
    assert [(started.id, "add")] == [(made.id, made.name) for made in answer.message.tool_calls]


async def test_a_delta_leaves_when_its_tokens_were_sampled():
    """Streaming is real: the first word can be read while the second is not sampled yet."""
    engine = EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with open_house(engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.stream(house, session))
        await anyio.wait_all_tasks_blocked()
        assert [AnswerStarted] == [type(item) for item in asking.heard]

        engine.release(len(encode("one", is_closed=False)))
        await anyio.wait_all_tasks_blocked()
        assert "one" == "".join(item.text for item in asking.heard if isinstance(item, TextDelta))
        engine.release(99)


# ---------------------------------------------------------------------------------------------------- hanging up


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_hanging_up_aborts_in_the_engine_and_keeps_what_was_sampled(way: str):
    """The interaction is cancelled, with the tokens so far; its session goes on."""
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with open_house(engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        asking = Asking()
        tasks.start_soon(lambda: getattr(asking, way)(house, session))
        await anyio.wait_all_tasks_blocked()
        engine.release(3)
        await anyio.wait_all_tasks_blocked()
        asking.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        (turn,) = (await house.record(session)).interactions
        engine.release(99)
        await house.complete(session, say("again"))

    assert (0, 1) == (engine.statistics().running, engine.statistics().aborted)
    assert InteractionStatus.CANCELLED == turn.status
    assert encode("one two three")[:3] == ids(turn.completion.token_ids)


async def test_leaving_a_stream_with_several_choices_aborts_all_of_them():
    """The choices that are told later run as well, and end with the first."""
    engine = EchoEngine(lambda _: encode("one two three"), is_gated=True)
    async with open_house(engine=engine) as house:
        session = (await house.open()).session
        async with house.sessions.stream(stream_request(session, num_choices=3)) as items:
            await anext(aiter(items))
            await anyio.wait_all_tasks_blocked()
            assert 3 == engine.statistics().waiting

        turns = (await house.record(session)).interactions

    assert (0, 3) == (engine.statistics().waiting, engine.statistics().aborted)
    assert [InteractionStatus.CANCELLED] * 3 == [turn.status for turn in turns]


async def test_choices_are_recorded_together_or_not_at_all():
    """A client that hung up before all choices were there has read none of them: none may be trained."""
    engine = EchoEngine(script_answers(encode("a"), encode("b c d e")), is_gated=True)
    async with open_house(engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.complete(house, session, num_choices=2))
        await anyio.wait_all_tasks_blocked()
        engine.release(5)
        await anyio.wait_all_tasks_blocked()
        asking.scope.cancel()
        await anyio.wait_all_tasks_blocked()
        turns = (await house.record(session)).interactions

    assert [InteractionStatus.CANCELLED] * 2 == [turn.status for turn in turns]


# ---------------------------------------------------------------------------------------------------- what fails


async def test_a_prompt_that_does_not_fit_leaves_no_trace():
    """The client is told the numbers; the tree has no interaction, and the engine was not asked."""
    async with open_house(engine=EchoEngine(context_length=12)) as house:
        session = (await house.open()).session
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 12 tokens"):
            await house.complete(session, say("a question of many words"))
        record = await house.record(session)

    assert () == record.interactions
    assert [] == house.engine.requests


async def test_an_answer_is_cut_where_the_context_ends():
    """The prompt leaves some room: the answer takes it and ends with LENGTH."""
    prompt = len(renderer().render(say("what?"), tools=(), template_kwargs={}))
    async with open_house(engine=EchoEngine(lambda _: encode("1" * 20), context_length=prompt + 4)) as house:
        session = (await house.open()).session
        (answer,) = await house.complete(session, say("what?"))

    assert (4, FinishReason.LENGTH) == (len(answer.completion.token_ids), answer.completion.finish)


async def test_a_session_that_ends_mid_request_refuses_the_answer():
    """Who ended it will not look for another turn: the interaction failed, and is not trained."""
    engine = EchoEngine(lambda _: encode("late"), is_gated=True)
    async with open_house(engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.complete(house, session))
        await anyio.wait_all_tasks_blocked()
        await house.sessions.ask(EndSession(credential=Credential(session=session)))
        engine.release(99)
        await anyio.wait_all_tasks_blocked()
        (turn,) = (await house.record(session)).interactions

    assert isinstance(asking.error, SessionEnded)
    assert InteractionStatus.FAILED == turn.status
    assert "ended while" in turn.failure


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_a_failing_engine_fails_the_request_and_not_the_session_manager(way: str):
    """The asker reads what happened to the engine; the interaction says it too; sessions are still there."""
    engine = EchoEngine(lambda _: encode("never"), is_gated=True)
    async with open_house(engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        asking = Asking()
        tasks.start_soon(lambda: getattr(asking, way)(house, session))
        await anyio.wait_all_tasks_blocked()
        engine.fail(RuntimeError("out of memory"))
        await anyio.wait_all_tasks_blocked()
        (turn,) = (await house.record(session)).interactions

    assert isinstance(asking.error, EngineError)
    assert "out of memory" in str(asking.error)
    assert InteractionStatus.FAILED == turn.status
    assert "out of memory" in turn.failure


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_what_was_sampled_before_a_failure_is_kept_and_listed(way: str):
    """Tokens of an answer that failed are not trained, and not forgotten either."""
    engine = EchoEngine(lambda _: encode("never"), is_gated=True)
    async with open_house(engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        tasks.start_soon(lambda: getattr(Asking(), way)(house, session))
        await anyio.wait_all_tasks_blocked()
        engine.release(2)
        await anyio.wait_all_tasks_blocked()
        engine.fail(RuntimeError("out of memory"))
        await anyio.wait_all_tasks_blocked()
        record = await house.record(session)
    (turn,) = record.interactions

    assert InteractionStatus.FAILED == turn.status
    assert encode("never")[:2] == ids(turn.completion.token_ids)
    for style in STYLES:
        exported = export_trajectories(record, discount=1.0, style=style)
        assert () == exported.trajectories
        assert (Untrained(interaction=turn.id, num_tokens=2, reason=UntrainedReason.FAILED),) == exported.untrained


async def test_without_a_generation_actor_requests_are_unavailable():
    """The engine's actor stopped: a 503 that clients repeat, and a failed interaction."""
    async with open_house() as house:
        session = (await house.open()).session
        await house.generation.stop()
        with pytest.raises(Unavailable, match="engine is gone"):
            await house.complete(session, say("anybody?"))
        (turn,) = (await house.record(session)).interactions

    assert InteractionStatus.FAILED == turn.status


@pytest.mark.parametrize("way", ["complete", "stream"])
async def test_what_the_engine_aborted_may_be_repeated(way: str):
    """A pause that aborts is nobody's answer: 503, which clients repeat."""
    engine = EchoEngine(lambda _: encode("one two"), is_gated=True)
    async with open_house(engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        asking = Asking()
        tasks.start_soon(lambda: getattr(asking, way)(house, session))
        await anyio.wait_all_tasks_blocked()
        engine.release(2)
        await anyio.wait_all_tasks_blocked()
        await house.generation.ask(PauseGeneration(mode=PauseMode.ABORT))
        await anyio.wait_all_tasks_blocked()
        (turn,) = (await house.record(session)).interactions

    assert isinstance(asking.error, Unavailable)
    assert InteractionStatus.FAILED == turn.status


async def test_messages_that_the_template_refuses_leave_no_trace():
    """The client reads the template's complaint."""
    async with open_house() as house:
        session = (await house.open()).session
        with pytest.raises(RenderError):
            await house.complete(session, ())
        record = await house.record(session)

    assert () == record.interactions


# ---------------------------------------------------------------------------------------------------- who may ask


async def test_keys_open_their_own_session_only():
    """By key, by URL, by both; a foreign key, an unknown key and an unknown session are refused by name."""
    async with open_house() as house:
        mine, other = await house.open(), await house.open()
        for credential in (
            Credential(key=mine.api_key),
            Credential(session=mine.session),
            Credential(session=mine.session, key="sk-any-other"),
        ):
            reply = await house.sessions.ask(EndSession(credential=credential))
            assert mine.session == reply.session

        for credential, error in (
            (Credential(key="sk-of-nobody"), Unauthorized),
            (Credential(session=mine.session, key=other.api_key), Unauthorized),
            (Credential(session=mine.session, is_capability=False), Unauthorized),
            (Credential(session=SessionId("nobody")), NotFound),
        ):
            with pytest.raises(error):
                await house.sessions.ask(EndSession(credential=credential))


async def test_a_key_serves_one_live_session_at_a_time():
    """A caller's own key conflicts while its session lives, and can be used again after it; short ones are refused."""
    async with open_house() as house:
        first = await house.open(api_key="my-own-key")
        with pytest.raises(Conflict, match="is live"):
            await house.open(api_key="my-own-key")
        with pytest.raises(InvalidRequest, match="at least 8"):
            await house.open(api_key="short")
        await house.sessions.ask(EndSession(credential=Credential(session=first.session)))
        second = await house.open(api_key="my-own-key")

        assert second.session != first.session


async def test_an_ended_session_takes_no_more_requests():
    """410, with the time since its end; ending it again is harmless."""
    async with open_house() as house:
        session = (await house.open()).session
        for _ in range(2):
            await house.sessions.ask(EndSession(credential=Credential(session=session)))
        with pytest.raises(SessionEnded, match="start a new one"):
            await house.complete(session, say("late"))


async def test_forgetting_ends_a_live_session_and_ignores_an_unknown_one():
    """Memory is freed at once; a request that is in flight is refused when it comes back."""
    engine = EchoEngine(lambda _: encode("late"), is_gated=True)
    async with open_house(engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.complete(house, session))
        await anyio.wait_all_tasks_blocked()
        for name in (session, session, SessionId("nobody")):
            await house.sessions.ask(ForgetSession(session=name))
        engine.release(99)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(NotFound):
            await house.record(session)

    assert isinstance(asking.error, SessionEnded)


# ---------------------------------------------------------------------------------------------- rewards and time


async def test_late_rewards_count_during_the_grace_window_and_no_longer():
    """A judge may take its time after the end, but not for ever."""
    config = SessionsConfig(lifetimes=SessionSettings(grace_seconds=60))
    async with open_house(sessions=config) as house:
        session = (await house.open()).session
        credential = Credential(session=session)
        (answer,) = await house.complete(session, say("what?"))
        await house.sessions.ask(EndSession(credential=credential, final_reward=0.5))
        await anyio.sleep(59)
        late = await house.sessions.ask(SetReward(credential=credential, reward=1.0))
        await anyio.sleep(2)
        with pytest.raises(SessionEnded, match="takes rewards for 60 s only"):
            await house.sessions.ask(SetReward(credential=credential, reward=2.0))
        with pytest.raises(SessionEnded):
            await house.sessions.ask(EndSession(credential=credential, final_reward=2.0))
        (turn,) = (await house.record(session)).interactions

    assert late == answer.interaction == turn.id
    assert 1.0 == turn.reward


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_is_refused(reward: float):
    """It would poison a whole batch; the session lives on and can be rewarded properly."""
    async with open_house() as house:
        session = (await house.open()).session
        credential = Credential(session=session)
        with pytest.raises(RewardError, match="no completed interaction"):
            await house.sessions.ask(SetReward(credential=credential, reward=1.0))
        await house.complete(session, say("what?"))
        with pytest.raises(RewardError):
            await house.sessions.ask(SetReward(credential=credential, reward=reward))
        with pytest.raises(RewardError):
            await house.sessions.ask(EndSession(credential=credential, final_reward=reward))

        assert not (await house.record(session)).is_ended


async def test_an_idle_session_ends_and_gives_its_permit_back():
    """An agent that was killed holds nothing; its session is kept for whoever wants to look at it."""
    config = SessionsConfig(lifetimes=SessionSettings(idle_seconds=100), sweep_seconds=10)
    async with open_house(sessions=config) as house:
        permit = await house.capacity.ask(ClaimPermit(holder="external"))
        session = (await house.open(permit=permit.id)).session
        await anyio.sleep(90)
        assert 1 == (await house.capacity.ask(DescribeCapacity())).running

        await anyio.sleep(30)
        view = await house.capacity.ask(DescribeCapacity())
        assert (0, 0) == (view.running, view.accepted)
        assert (await house.record(session)).is_ended


async def test_a_session_with_a_request_in_flight_is_not_idle():
    """Neither while the model thinks for hours, nor right after it has answered."""
    config = SessionsConfig(lifetimes=SessionSettings(idle_seconds=100), sweep_seconds=10)
    engine = EchoEngine(lambda _: encode("at last"), is_gated=True)
    async with open_house(sessions=config, engine=engine) as house, anyio.create_task_group() as tasks:
        session = (await house.open()).session
        asking = Asking()
        tasks.start_soon(lambda: asking.complete(house, session))
        await anyio.sleep(1000)
        engine.release(99)
        await anyio.sleep(50)

        assert asking.answers
        assert not (await house.record(session)).is_ended


@pytest.mark.parametrize("ending", ["end", "forget"])
async def test_an_external_session_gives_its_permit_back_unaccepted(ending: str):
    """What it exports is not queued for the trainer, whose batches must not wait for it."""
    async with open_house() as house:
        permit = await house.capacity.ask(ClaimPermit(holder="external"))
        session = (await house.open(permit=permit.id)).session
        await house.complete(session, say("what?"))
        for _ in range(2):
            if ending == "end":
                await house.sessions.ask(EndSession(credential=Credential(session=session)))
            else:
                await house.sessions.ask(ForgetSession(session=session))
        await anyio.wait_all_tasks_blocked()
        view = await house.capacity.ask(DescribeCapacity())

        assert (0, 0) == (view.running, view.accepted)


# ------------------------------------------------------------------------------------------------- forms of answers


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": (Tool(name="f"),), "tool_choice": ToolChoice.REQUIRED}, "tool_choice"),
        ({"tools": (Tool(name="f"),), "tool_choice": "f"}, "tool_choice"),
        ({"response_format": JsonText()}, "response_format"),
    ],
)
async def test_that_an_engine_without_grammars_is_not_asked_for_one(options, param):
    """It is refused by name, and the session remembers nothing of it."""
    async with open_house() as house:
        opened = await house.open()
        with pytest.raises(UnsupportedParameter, match=param) as caught:
            await house.complete(opened.session, say("hi"), **options)
        record = await house.record(opened.session)

    assert caught.value.param == param
    assert record.interactions == ()
    assert house.engine.requests == []


async def test_that_the_engine_is_asked_for_what_the_renderer_says():
    """With grammars, a demanded call goes to the engine as one; a strict tool that may be called does not."""
    tool = Tool(name="f", is_strict=True)
    async with open_house(engine=EchoEngine(lambda _: encode("42"), has_grammars=True)) as house:
        opened = await house.open()
        await house.complete(opened.session, say("hi"), tools=(tool,), tool_choice=ToolChoice.REQUIRED)
        await house.complete(opened.session, say("hi"), tools=(tool,))

    demanded, free = house.engine.requests
    assert demanded.grammar == renderer().constrain(tools=(tool,), tool_choice=ToolChoice.REQUIRED)
    assert free.grammar is None


async def test_that_a_grammar_the_engine_refuses_leaves_nothing_pending():
    """The client learns why; the interaction has failed, and the session goes on."""

    class Refusing(EchoEngine):
        def _validate(self, request):
            if request.grammar is not None:
                raise UnsupportedParameter("no such form")

    async with open_house(engine=Refusing(lambda _: encode("42"), has_grammars=True)) as house:
        opened = await house.open()
        with pytest.raises(UnsupportedParameter, match="no such form"):
            await house.complete(opened.session, say("hi"), response_format=JsonText())
        await house.complete(opened.session, say("hi"))
        record = await house.record(opened.session)

    assert [i.status for i in record.interactions] == [InteractionStatus.FAILED, InteractionStatus.COMPLETED]
