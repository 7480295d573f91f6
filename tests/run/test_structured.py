"""Forms of answers from end to end: the OpenAI SDK, the proxy, and a model that knows nothing but what it may say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import anyio
import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.run.inference import EmbeddedSession, InferenceConfig, open_inference

pytestmark = [
    pytest.mark.anyio,
    # At [DONE] the SDK leaves its generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx|openai|httpcore):ResourceWarning"),
]

CONFIG = InferenceConfig(engine=TorchEngineConfig(dtype="float32", max_concurrent=8, max_length=1024))
QUESTION = [{"role": "user", "content": "What is 12 times 34?"}]


class Multiply(BaseModel):
    """What the tool takes; a random model says nothing short, so all is bounded."""

    a: int = Field(ge=-99, le=99)
    b: Literal["one", "two"]
    exact: bool


class Verdict(BaseModel):
    """A form with a list of objects in it, by reference."""

    guesses: list[Multiply] = Field(max_length=2)
    word: str = Field(max_length=8)


TOOLS = [
    {"type": "function", "function": {"name": "multiply", "parameters": Multiply.model_json_schema()}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]


@asynccontextmanager
async def _open() -> AsyncIterator[tuple[openai.AsyncOpenAI, EmbeddedSession]]:
    """A session of the tiny model, and an SDK that speaks to it."""
    async with (
        open_inference("tiny", CONFIG) as inference,
        inference.session() as session,
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client,
    ):
        yield client, session


def _check_call(call) -> str:
    """The name of a call whose arguments satisfy its schema."""
    arguments = json.loads(call.function.arguments)
    assert Multiply.model_validate(arguments) if call.function.name == "multiply" else arguments == {}
    return call.function.name


async def test_required_tool_call_is_valid_with_random_weights():
    """Whatever the weights and the draws: one call, of a tool that was offered, with arguments that validate."""
    async with _open() as (client, session):
        answers = []

        async def ask(seed: int) -> None:
            answers.append(
                await client.chat.completions.create(
                    model="m",
                    messages=QUESTION,
                    tools=TOOLS,
                    tool_choice="required",
                    parallel_tool_calls=False,
                    seed=seed,
                    max_tokens=300,
                    logprobs=True,
                )
            )

        async with anyio.create_task_group() as tasks:
            for seed in range(8):
                tasks.start_soon(ask, seed)
        await session.set_reward(1.0)
        episode = await session.export()

    names = {_check_call(call) for answer in answers for call in answer.choices[0].message.tool_calls}
    assert names == {"multiply", "stop"}
    assert {"tool_calls"} == {answer.choices[0].finish_reason for answer in answers}
    assert {1} == {len(answer.choices[0].message.tool_calls) for answer in answers}
    assert answers[0].choices[0].logprobs.content[0].logprob == 0  # all calls begin alike
    assert len(episode.trajectories) == 8
    assert all(np.isfinite(row.logprobs).all() for row in episode.trajectories)


@pytest.mark.parametrize(
    ("options", "anyio_backend"),
    [({}, "trio"), ({"temperature": 0}, "asyncio"), ({"temperature": 2, "top_p": 0.5, "n": 2}, "trio")],
)
async def test_a_schema_of_the_sdk_is_parsed_by_the_sdk(options):
    """The SDK derives a strict schema from a class, and parses what comes back into it."""
    async with _open() as (client, _):
        answer = await client.chat.completions.parse(
            model="m", messages=QUESTION, response_format=Verdict, max_tokens=900, seed=3, **options
        )

    assert all(isinstance(choice.message.parsed, Verdict) for choice in answer.choices)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra_body": {"guided_regex": "("}}, "unclosed group"),
        ({"extra_body": {"guided_regex": "(?=a)b"}}, "look-around"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}}, "odd"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array", "uniqueItems": True}, "strict": True},
                }
            },
            "uniqueItems",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "divide"}}}, "divide"),
    ],
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # what is refused depends on no loop
async def test_an_unsupported_schema_is_a_bad_request(options, words):
    """The reason is in the message; the engine lives on, and the next request is answered."""
    async with _open() as (client, _):
        with pytest.raises(openai.BadRequestError, match=words):
            await client.chat.completions.create(model="m", messages=QUESTION, **options)
        answer = await client.chat.completions.create(
            model="m", messages=QUESTION, extra_body={"guided_choice": ["yes", "no"]}
        )

    assert answer.choices[0].message.content in ("yes", "no")
