"""Strands: its agent calls the tools, remembers, and always streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from driver import TOOLS, Client, Report, Task, serve
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel


class ReportModel(BaseModel):
    """A report on a city."""

    city: str
    degrees: int


def _options(task: Task, url: str) -> dict[str, Any]:
    params = {"params": {"extra_body": dict(task.extra)}} if task.extra else {}
    return {"client_args": {"base_url": url, "api_key": task.api_key, "max_retries": 1}, "model_id": "policy", **params}


def chat(task: Task) -> Any:
    """Chat completions."""
    return OpenAIModel(**_options(task, task.openai_url))


def responses(task: Task) -> Any:
    """Responses."""
    return OpenAIResponsesModel(**_options(task, task.openai_url))


def messages(task: Task) -> Any:
    """Anthropic's Messages."""
    return AnthropicModel(**_options(task, task.anthropic_url), max_tokens=512)


class Agents(Client):
    """An agent on one of the models."""

    def __init__(self, model: Callable[[Task], Any]) -> None:
        self._model = model

    def _agent(self, task: Task, **options: Any) -> Agent:
        return Agent(
            model=self._model(task), system_prompt="Be kind.", callback_handler=None, retry_strategy=None, **options
        )

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        agent = self._agent(task, tools=[tool(function) for function in TOOLS.values()] if has_tools else [])
        return [str(await agent.invoke_async(question)) for question in questions]

    async def report(self, task: Task, question: str) -> Report:
        return (await self._agent(task).structured_output_async(ReportModel, question)).model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        events = self._agent(task).stream_async(question)
        async for event in events:
            if event.get("data"):
                break
        await events.aclose()


if __name__ == "__main__":
    serve({"chat": Agents(chat), "responses": Agents(responses), "messages": Agents(messages)})
