"""A Pydantic AI agent: it may call a tool, and its typed answer is the call of an output tool."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Product(BaseModel):
    """The answer."""

    value: int


agent = Agent(output_type=Product, instructions="Use the tool, then answer with the number.")


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


class PydanticAIAgent:
    """Calls ``multiply``, then returns the product. The reward is its similarity to the correct one."""

    def __init__(self, max_tokens: int = 64) -> None:
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Work on one problem, in at most four turns."""
        injected: dict[str, Any] = {name: extra_kwargs.get(name) for name in ("base_url", "api_key", "http_client")}
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=AsyncOpenAI(**injected)))
        try:
            result = await agent.run(
                data["question"],
                model=model,
                model_settings={"max_tokens": self.max_tokens, "parallel_tool_calls": False},
                usage_limits=UsageLimits(request_limit=4),
            )
        except (UnexpectedModelBehavior, UsageLimitExceeded):  # the model's error: a low reward, not a failed episode
            return 0.0
        return SequenceMatcher(None, str(result.output.value), str(data["answer"])).ratio()
