"""Agents over a dataset whose episodes take different times, as with tools: in the run, a command, and a workflow.

Some always fail, some are not deterministic, and some ask two things at once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import anyio
import torch
from openai import AsyncOpenAI

from areal_actors.workflows import EpisodeEngine, ModelRequest, RolloutWorkflow

FAILING = 7
"""Every so many problems, the agent raises."""
CHANGING = 5
"""Every so many problems, a tool gives another result each time."""
PAUSES = (0.0, 0.02, 0.2, 0.6)
MAX_TURNS = 8


def problems(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``num`` prompts that differ by a number."""
    for index in range(num):
        yield {"question": f"say {seed + index}", "number": seed + index}


def share_of_digits(text: str) -> float:
    """The reward."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


class ToolAgent:
    """Takes one to eight turns with pauses between them."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask, wait for a tool, and ask again; every third problem is looked at in two ways at once."""
        number = data["number"]
        if number % FAILING == FAILING - 1:
            raise ValueError("the tool of this problem is broken")
        is_random = number % CHANGING == CHANGING - 1
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        texts: dict[int, str] = {}

        async def talk(way: int) -> None:
            plan = random.Random(10 * number + way)
            messages: list[Any] = [{"role": "user", "content": f"{data['question']} {way}"}]
            for turn in range(plan.randint(1, MAX_TURNS)):
                asked = {"model": "policy", "messages": messages, "max_tokens": 4}
                if turn % 2:
                    chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **asked)]
                    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                else:
                    text = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
                texts[way] = text
                await anyio.sleep(plan.choice(PAUSES))
                result = os.urandom(2).hex() if is_random else turn
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{result}"}]

        async with anyio.create_task_group() as ways:
            for way in range(2 if number % 3 == 0 else 1):
                ways.start_soon(talk, way)
        return share_of_digits("".join(texts.values()))


class ToolWorkflow(RolloutWorkflow):
    """Samples from the engine, without a session."""

    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> dict[str, Any]:
        """Continue the ids a few times, with pauses; the row is the last of them."""
        plan = random.Random(data["number"])
        ids = engine.renderer.encode(data["question"], is_start=True).tolist()
        mask, logprobs, versions = [0] * len(ids), [0.0] * len(ids), [-1] * len(ids)
        for _ in range(plan.randint(1, MAX_TURNS)):
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=engine.gconfig.new(max_new_tokens=4)))
            ids += [*response.output_tokens, plan.randrange(3, 20)]
            mask += [1] * response.output_len + [0]
            logprobs += [*response.output_logprobs, 0.0]
            versions += [*response.output_versions, -1]
            await anyio.sleep(plan.choice(PAUSES))
        return {
            "input_ids": torch.tensor([ids], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "loss_mask": torch.tensor([mask], dtype=torch.int32),
            "logprobs": torch.tensor([logprobs]),
            "versions": torch.tensor([versions], dtype=torch.int32),
            "rewards": torch.tensor([share_of_digits(engine.renderer.decode(torch.tensor(ids).numpy()))]),
        }
