"""An agent of the OpenAI Agents SDK: its runner asks for a call, runs the tool, and asks for the answer."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)  # traces would go to OpenAI, with the key of this episode


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


class OpenAIAgentsAgent:
    """Calls ``multiply``, then answers. The reward is the share of the answer's characters that are digits."""

    def __init__(self, max_tokens: int = 64) -> None:
        # The first turn must call the tool; after that, the SDK resets the choice.
        self.settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=max_tokens)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Work on one problem, in at most four turns."""
        injected: dict[str, Any] = {name: extra_kwargs.get(name) for name in ("base_url", "api_key", "http_client")}
        agent = Agent(
            name="Calculator",
            instructions="Use the tool, then answer with the number.",
            tools=[multiply],
            model=OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI(**injected)),
            model_settings=self.settings,
        )
        try:
            result = await Runner.run(agent, data["question"], max_turns=4)
        except (MaxTurnsExceeded, ModelBehaviorError):  # the model's error: a low reward, not a failed episode
            return 0.0
        text = str(result.final_output)
        return sum(character.isdigit() for character in text) / max(len(text), 1)
