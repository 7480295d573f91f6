"""Pydantic AI: its agent calls the tools, and ``all_messages()`` is its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
from driver import TOOLS, Client, Report, Task, serve
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class ReportModel(BaseModel):
    """A report on a city."""

    city: str
    degrees: int


def openai_provider(task: Task) -> OpenAIProvider:
    """The connection to OpenAI's endpoints."""
    return OpenAIProvider(
        openai_client=openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, max_retries=1)
    )


def chat(task: Task) -> Any:
    """Chat completions."""
    return OpenAIChatModel("policy", provider=openai_provider(task))


def responses(task: Task) -> Any:
    """Responses."""
    return OpenAIResponsesModel("policy", provider=openai_provider(task))


def messages(task: Task) -> Any:
    """Anthropic's Messages."""
    client = anthropic.AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key, max_retries=1)
    return AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))


async def read(_: Any, events: Any) -> None:
    """Read all events: that makes the agent stream, beyond the first text of a turn that calls tools, too."""
    async for _ in events:
        pass


class Agents(Client):
    """An agent on one of the models."""

    def __init__(self, model: Callable[[Task], Any]) -> None:
        self._model = model

    def _agent(self, task: Task, **options: Any) -> Agent[Any, Any]:
        settings: Any = {"extra_body": task.extra} if task.extra else None
        return Agent(self._model(task), instructions="Be kind.", model_settings=settings, **options)

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        agent = self._agent(task, tools=list(TOOLS.values()) if has_tools else [])
        history: Any = None
        answers = []
        for question in questions:
            handler = read if is_stream else None
            result = await agent.run(question, message_history=history, event_stream_handler=handler)
            answers.append(result.output)
            history = result.all_messages()
        return answers

    async def report(self, task: Task, question: str) -> Report:
        return (await self._agent(task, output_type=ReportModel).run(question)).output.model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        async with self._agent(task).run_stream(question) as result:
            async for _ in result.stream_text(debounce_by=None):
                break


if __name__ == "__main__":
    serve({"chat": Agents(chat), "responses": Agents(responses), "messages": Agents(messages)})
