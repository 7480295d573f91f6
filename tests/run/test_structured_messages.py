"""Forms of answers through Anthropic's SDK: structured outputs by tool and by format, from random weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import pytest
from pydantic import BaseModel, Field

from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.run.inference import InferenceConfig, open_inference

pytestmark = [
    pytest.mark.anyio,
    # At its end the SDK leaves a stream's generators to the garbage collector, of which trio warns.
    pytest.mark.filterwarnings("ignore:Async generator '(httpx2|anthropic|httpcore2?):ResourceWarning"),
]

CONFIG = InferenceConfig(engine=TorchEngineConfig(dtype="float32", max_concurrent=8, max_length=1024))


class Guess(BaseModel, extra="forbid"):
    """What is asked for; a random model says nothing short, so all is bounded."""

    number: int = Field(ge=-99, le=99)
    is_sure: bool


TOOLS = [
    {"name": "guess", "input_schema": Guess.model_json_schema()},
    {"name": "stop", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
ASK = {"model": "m", "max_tokens": 700, "messages": [{"role": "user", "content": "What is 12 times 34?"}]}


@asynccontextmanager
async def _open() -> AsyncIterator[anthropic.AsyncAnthropic]:
    """An SDK client of a session of the tiny model."""
    async with open_inference("tiny", CONFIG) as inference, inference.session() as session:
        base_url = session.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=session.api_key, max_retries=0) as client:
            yield client


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "tool", "name": "guess", "disable_parallel_tool_use": True}, {"guess"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"guess", "stop"}),
    ],
)
async def test_required_anthropic_call_is_valid_with_random_weights(choice, names):
    """Streamed or not: one call, of a tool that was allowed, with an input that validates."""
    ask = ASK | {"tools": TOOLS, "tool_choice": choice}
    async with _open() as client:
        answers = [await client.messages.create(**ask)]
        async with client.messages.stream(**ask) as stream:
            answers.append(await stream.get_final_message())

    for answer in answers:
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == "tool_use"
        assert call.name in names
        assert Guess.model_validate(call.input) if call.name == "guess" else call.input == {}
