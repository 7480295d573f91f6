"""A LangChain agent: the graph of ``create_agent`` calls the model, runs the tool, and calls the model again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware, ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langsmith import tracing_context


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


@wrap_model_call
async def call_first(
    request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
) -> ModelResponse:
    """Require a tool call in the first turn only. All turns describe the tool in the same words."""
    request = request.override(model_settings={"parallel_tool_calls": False, "strict": True})
    has_result = any(isinstance(message, ToolMessage) for message in request.messages)
    return await handler(request if has_result else request.override(tool_choice="required"))


class LangChainAgent:
    """Calls ``multiply``, then answers. The reward is the share of the answer's characters that are digits."""

    def __init__(self, max_tokens: int = 64) -> None:
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Work on one problem, in four turns at most."""
        model = ChatOpenAI(
            model="policy",
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_async_client=extra_kwargs.get("http_client"),
            max_tokens=self.max_tokens,
        )
        agent = create_agent(
            model,
            [multiply],
            system_prompt="Use the tool, then answer with the number.",
            middleware=[call_first, ModelCallLimitMiddleware(run_limit=4)],
        )
        with tracing_context(enabled=False):  # overrides LANGSMITH_TRACING
            state = await agent.ainvoke({"messages": [{"role": "user", "content": data["question"]}]})
        text = state["messages"][-1].text
        return sum(character.isdigit() for character in text) / max(len(text), 1)
