"""A CAMEL agent: a ``ChatAgent`` with a tool and a memory answers two questions."""

from __future__ import annotations

from typing import Any

from camel.agents import ChatAgent
from camel.models import OpenAICompatibleModel
from camel.toolkits import FunctionTool
from camel.utils import BaseTokenCounter
from openai import AsyncOpenAI


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a (int): The first.
        b (int): The second.
    """
    return a * b


class CharacterCounter(BaseTokenCounter):
    """Counts characters for CAMEL's memory. CAMEL's default counter downloads the encoding of another model."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        """Return the total length of all messages."""
        return sum(len(str(message.get("content"))) for message in messages)

    def encode(self, text: str) -> list[int]:
        """Return one number per byte."""
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of these bytes."""
        return bytes(token_ids).decode(errors="replace")


class CamelAgent:
    """Asks two questions, the second of which needs the memory. The reward is the share of digits in the answers."""

    def __init__(self, max_tokens: int = 24) -> None:
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Work on one problem; each question may call the tool, twice at most."""
        injected: dict[str, Any] = {name: extra_kwargs.get(name) for name in ("base_url", "api_key", "http_client")}
        model = OpenAICompatibleModel(
            model_type="policy",
            model_config_dict={"max_tokens": self.max_tokens},
            url=injected["base_url"],
            api_key=injected["api_key"],
            async_client=AsyncOpenAI(**injected),
            token_counter=CharacterCounter(),
        )
        agent = ChatAgent(
            "Answer with the number alone.",
            model=model,
            tools=[FunctionTool(multiply)],
            token_limit=100_000,
            max_iteration=2,
        )
        text = ""
        for question in (data["question"], "And ten times that?"):
            response = await agent.astep(question)
            text += response.msgs[0].content or ""
        return sum(character.isdigit() for character in text) / max(len(text), 1)
