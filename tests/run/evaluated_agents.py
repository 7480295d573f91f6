"""Agents of the tests of evaluations: each notes its episodes in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from areal_actors.workflows import RolloutWorkflow, workflow_context

NOTES = "EVALUATED_NOTES"


def problems(num, seed):
    """Yield questions that differ by a number."""
    for index in range(num):
        yield {"question": f"say {seed + index}", "index": index}


class Noting:
    """Two turns; fails on the problem with index ``broken``."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    async def run(self, data, **extra_kwargs):
        """Return the share of digits in the last answer."""
        context = workflow_context.get()
        if NOTES in os.environ:
            with Path(os.environ[NOTES]).open("a") as file:  # noqa: ASYNC230 - a line of a test
                file.write(json.dumps([context.task_id, context.member]) + "\n")
        messages = [{"role": "user", "content": data["question"]}]
        async with AsyncOpenAI(base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"]) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
                text = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
        if data["index"] == self.broken:
            raise ValueError("this problem breaks the agent")
        return sum(character.isdigit() for character in text) / max(len(text), 1)


class Anthropic:
    """Asks on Anthropic's route, and rewards one answer by its id."""

    async def run(self, data, **extra_kwargs):
        """Return a reward for the answer."""
        asked = {"model": "policy", "messages": [{"role": "user", "content": data["question"]}], "max_tokens": 4}
        async with httpx.AsyncClient() as client:
            response = await client.post(f"{extra_kwargs['base_url']}/messages", json=asked)
        return {response.raise_for_status().json()["id"]: 1.0}


class Silent:
    """Never calls the model."""

    async def run(self, data, **extra_kwargs):
        """Return a reward for nothing."""
        return 1.0


class Sampling(RolloutWorkflow):
    """Samples tokens itself."""

    async def arun_episode(self, engine, data):
        """Return nothing."""
        return
