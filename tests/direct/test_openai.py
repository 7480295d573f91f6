"""``ArealOpenAI``: the real SDK, the real proxy application and session manager, and no socket."""

from __future__ import annotations

from typing import Any

import anyio
import openai
import pytest
from tests.stacks.inference_stack import encode, renderer, tokenizer

from areal_actors.direct import ArealOpenAI
from areal_actors.domain import FinishReason
from areal_actors.errors import ConfigError, ExportError, NotFound, RewardError
from areal_actors.testing.engines import EchoEngine, script_answers

pytestmark = [
    pytest.mark.anyio,
    # trio speaks of generators that the SDK leaves behind at the end of its streams
    pytest.mark.filterwarnings("ignore:Async generator 'openai:ResourceWarning"),
]

QUESTION: list[Any] = [{"role": "user", "content": "one plus one?"}]


def engine_that_says(*answers: str, **options: Any) -> EchoEngine:
    return EchoEngine(script_answers(*map(encode, answers)), **options)


def client_on(engine: EchoEngine) -> ArealOpenAI:
    return ArealOpenAI(engine=engine, tokenizer=renderer())


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="default", messages=messages, **options)


def follow(messages: list[Any], answer: Any, text: str) -> list[Any]:
    return [*messages, answer.choices[0].message, {"role": "user", "content": text}]


async def test_answer_comes_without_a_socket() -> None:
    """It is the SDK's own object, and its tokens are those of the engine."""
    engine = engine_that_says("two")
    async with client_on(engine) as client:
        answer = await ask(client, QUESTION)
        interaction = client.get_interaction(answer.id)
    assert answer.choices[0].message.content == "two"
    assert interaction.completion is answer
    assert interaction.messages == QUESTION
    assert interaction.model_response is not None
    assert interaction.model_response.input_tokens == engine.requests[0].prompt.tolist()
    assert interaction.model_response.output_tokens == encode("two")
    assert interaction.model_response.output_versions == [0] * len(encode("two"))
    assert interaction.model_response.stop_reason == FinishReason.STOP


async def test_responses_are_answered_as_well() -> None:
    """Under ids that rewards find; what names the answer before it extends its exact tokens."""
    engine = engine_that_says("two", "three")
    async with client_on(engine) as client:
        first = await client.responses.create(model="default", input="one plus one?")
        second = await client.responses.create(model="default", input="and one?", previous_response_id=first.id)
        client.set_reward(second.id, 1.0)
        client.apply_reward_discount(turn_discount=0.9)
        rows = client.export_interactions(style="individual")
        completion = client.get_interaction(first.id).completion
    said = [*engine.requests[0].prompt.tolist(), *encode("two")]
    assert second.output_text == "three"
    assert completion is first
    assert engine.requests[1].prompt.tolist()[: len(said)] == said
    assert {name: row.reward for name, row in rows.items()} == pytest.approx({first.id: 0.9, second.id: 1.0})


async def test_tokenizer_is_enough() -> None:
    """Its renderer is made once, however many clients there are."""
    first = ArealOpenAI(engine=engine_that_says("a"), tokenizer=tokenizer())
    second = ArealOpenAI(engine=engine_that_says("b"), tokenizer=tokenizer())
    assert (await ask(first, QUESTION)).choices[0].message.content == "a"
    assert (await ask(second, QUESTION)).choices[0].message.content == "b"


async def test_rewards_flow_back_along_a_conversation() -> None:
    """1.0, 0.9, 0.81; and with another discount as if the first had never been applied."""
    client = client_on(engine_that_says("two", "three", "four"))
    messages, answers = QUESTION, []
    for text in ("and one?", "and one more?", "stop"):
        answers.append(await ask(client, messages))
        messages = follow(messages, answers[-1], text)
    client.set_last_reward(1.0)
    assert [client.get_interaction(answer.id).reward for answer in answers] == [None, None, 1.0]
    assert list(client.apply_reward_discount(turn_discount=0.9).values()) == pytest.approx([0.81, 0.9, 1.0])
    rows = client.export_interactions(style="individual")
    assert list(rows) == [answer.id for answer in answers]
    assert [row.reward for row in rows.values()] == pytest.approx([0.81, 0.9, 1.0])
    assert rows[answers[1].id].parent is not None
    assert rows[answers[1].id].parent.interaction_id == answers[0].id
    halved = client.export_completions(turn_discount=0.5)
    assert [row.reward for row in halved.values()] == pytest.approx([0.25, 0.5, 1.0])


async def test_rows_have_the_documented_tensors() -> None:
    """Names, dtypes and shapes; one row of the whole conversation in style concat."""
    client = client_on(engine_that_says("two", "three"))
    first = await ask(client, QUESTION)
    second = await ask(client, follow(QUESTION, first, "and one?"))
    client.set_reward(first.id, 0.5)
    client.set_reward(second.id, 1)
    rows = client.export_interactions(style="concat")
    assert list(rows) == [second.id]
    tensors = rows[second.id].to_tensor_dict()
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "input_ids": "torch.int32",
        "attention_mask": "torch.bool",
        "loss_mask": "torch.int32",
        "logprobs": "torch.float32",
        "versions": "torch.int32",
        "returns": "torch.float32",
        "rewards": "torch.float32",
        "temperatures": "torch.float32",
    }
    assert int(tensors["loss_mask"].sum()) == len(encode("two")) + len(encode("three"))
    assert tensors["rewards"].tolist() == [1.0]


async def test_without_a_discount_every_turn_keeps_its_own_reward() -> None:
    """A reward does not flow unless it was asked for."""
    client = client_on(engine_that_says("two", "three"))
    first = await ask(client, QUESTION)
    second = await ask(client, follow(QUESTION, first, "and one?"))
    client.set_reward(second.id, 1.0)
    assert [row.reward for row in client.export_interactions().values()] == [0.0, 1.0]


async def test_openai_client_streams_an_answer() -> None:
    """The application runs to its end first, so the events of the stream arrive together."""
    client = client_on(engine_that_says("one two three"))
    stream = await ask(client, QUESTION, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one two three"
    assert len(client.export_interactions()) == 1


async def test_cancelled_request_aborts_the_generation() -> None:
    """A deadline of the caller is a hang-up."""
    engine = engine_that_says("one", is_gated=True)
    client = client_on(engine)
    with anyio.move_on_after(0.05) as scope:
        await ask(client, QUESTION)
    assert scope.cancelled_caught
    assert engine.statistics().aborted == 1


async def test_read_timeout_is_the_sdks() -> None:
    """The SDK's own option works, and its exception comes."""
    client = client_on(engine_that_says("one", is_gated=True)).with_options(timeout=0.05, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        await ask(client, QUESTION)


async def test_copies_share_the_trajectory() -> None:
    """Options change, tokens and rewards are one."""
    client = client_on(engine_that_says("two", "three"))
    first = await ask(client.with_options(max_retries=0), QUESTION)
    await ask(client.copy(timeout=5), follow(QUESTION, first, "and one?"))
    client.set_last_reward(1.0)
    assert len(client.export_completions()) == 2


async def test_errors_are_the_sdks() -> None:
    """A request that makes no sense is a BadRequestError, as over HTTP."""
    client = client_on(engine_that_says("two"))
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await ask(client, QUESTION, temperature=99)


async def test_many_at_once_do_not_mix() -> None:
    """Twenty questions, twenty interactions."""
    client = client_on(EchoEngine())
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(ask, client, [{"role": "user", "content": f"number {number}"}])
    assert len(client.export_interactions()) == 20


async def test_invalid_arguments_are_refused() -> None:
    """No engine, no tokenizer, no such answer, no such style, no number."""
    with pytest.raises(ConfigError, match="needs an engine"):
        ArealOpenAI(tokenizer=renderer())
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        ArealOpenAI(engine=EchoEngine())
    client = client_on(engine_that_says("two"))
    answer = await ask(client, QUESTION)
    with pytest.raises(NotFound):
        client.get_completions("chatcmpl-unknown")
    with pytest.raises(NotFound):
        client.set_reward("chatcmpl-unknown", 1.0)
    with pytest.raises(RewardError):
        client.set_reward(answer.id, float("nan"))
    with pytest.raises(ExportError):
        client.export_interactions(style="no such style")
    assert [0.0] == client.get_interaction(answer.id).to_tensor_dict()["rewards"].tolist()


async def test_model_may_be_left_out() -> None:
    """Also of ``parse``, and through a copy of the client: an engine in this process has but one."""
    client: Any = client_on(engine_that_says("one", "two", "three"))
    whole = await client.chat.completions.create(messages=QUESTION)
    parsed = await client.chat.completions.parse(messages=QUESTION)
    copied = await client.with_options(timeout=9).chat.completions.create(messages=QUESTION)

    said = [answer.choices[0].message.content for answer in (whole, parsed, copied)]
    assert ["one", "two", "three"] == said
