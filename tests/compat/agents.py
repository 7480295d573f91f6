"""The documented agents, as people write them; a child process imports this module and nothing else of the tests."""

from __future__ import annotations

import os
from typing import Any

from openai import AsyncOpenAI, OpenAI

__all__ = ["KeyedAgent", "MyAgent", "MySyncAgent", "PerCompletionAgent"]


def compute_reward(response: Any, answer: str) -> float:
    return 0.5 + 0.5 * (response.choices[0].message.content == answer)


class MyAgent:
    """No key at all: the base URL opens the session. A placeholder is there, where the SDK insists on a key."""

    async def run(self, data: Any, **extra_kwargs: Any) -> float:
        http_client = extra_kwargs.get("http_client")
        base_url = extra_kwargs.get("base_url")
        client = AsyncOpenAI(base_url=base_url, http_client=http_client, max_retries=0)
        response = await client.chat.completions.create(model="default", messages=data["messages"])
        return compute_reward(response, data["answer"])


class KeyedAgent:
    """The injected key, or that of the environment."""

    async def run(self, data: Any, **extra_kwargs: Any) -> float:
        http_client = extra_kwargs.get("http_client")
        base_url = extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL")
        api_key = extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY")
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        response = await client.chat.completions.create(model="default", messages=data["messages"])
        return compute_reward(response, data["answer"])


class MySyncAgent:
    """Blocks, in a child process."""

    async def run(self, data: Any, **extra_kwargs: Any) -> float:
        with OpenAI(base_url=os.environ.get("OPENAI_BASE_URL"), api_key="DUMMY") as client:
            response = client.chat.completions.create(model="default", messages=data["messages"])
        return compute_reward(response, data["answer"])


class PerCompletionAgent:
    """Two turns, each with a reward of its own."""

    async def run(self, data: Any, **extra_kwargs: Any) -> dict[str, float]:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"], api_key="DUMMY", http_client=extra_kwargs["http_client"]
        )
        first = await client.chat.completions.create(model="default", messages=data["messages"])
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        more = [*data["messages"], answer, {"role": "user", "content": "Sure?"}]
        second = await client.chat.completions.create(model="default", messages=more)
        return {first.id: 0.5, second.id: 1.0}
