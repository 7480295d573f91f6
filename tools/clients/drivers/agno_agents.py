"""Agno: its agent calls the tools, and remembers in a database in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses
from agno.run.base import RunStatus
from driver import TOOLS, Client, Report, Reported, Task, leave_at_first, serve
from pydantic import BaseModel


class ReportModel(BaseModel):
    """A report on a city."""

    city: str
    degrees: int


def _options(task: Task, url: str) -> dict[str, Any]:
    extra = {"request_params": {"extra_body": dict(task.extra)}} if task.extra else {}
    return {"id": "policy", "base_url": url, "api_key": task.api_key, "max_retries": 1, **extra}


def chat(task: Task) -> Any:
    """Chat completions."""
    return OpenAIChat(**_options(task, task.openai_url))


def responses(task: Task) -> Any:
    """Responses."""
    return OpenAIResponses(**_options(task, task.openai_url))


def messages(task: Task) -> Any:
    """Anthropic's Messages."""
    options = _options(task, task.anthropic_url)
    params = {"base_url": options.pop("base_url"), "max_retries": options.pop("max_retries")}
    return Claude(**options, max_tokens=512, client_params=params)


class Agents(Client):
    """An agent on one of the models. It reports failures as the status of a run."""

    def __init__(self, model: Callable[[Task], Any]) -> None:
        self._model = model

    def _agent(self, task: Task, **options: Any) -> Agent:
        return Agent(model=self._model(task), telemetry=False, instructions="Be kind.", **options)

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        tools = list(TOOLS.values()) if has_tools else None
        agent = self._agent(
            task, tools=tools, db=InMemoryDb(), add_history_to_context=True, session_id=f"talk-{task.label}"
        )
        return [await self._turn(agent, question, is_stream=is_stream) for question in questions]

    async def _turn(self, agent: Agent, question: str, *, is_stream: bool) -> str:
        if is_stream:
            events = agent.arun(question, stream=True)
            return "".join([event.content or "" async for event in events if event.event == "RunContent"])
        result = await agent.arun(question)
        if result.status is RunStatus.error:
            raise Reported("RunStatus.error", str(result.content))
        return str(result.content)

    async def report(self, task: Task, question: str) -> Report:
        return (await self._agent(task, output_schema=ReportModel).arun(question)).content.model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        events = self._agent(task).arun(question, stream=True)
        await leave_at_first(events, lambda event: event.event == "RunContent" and event.content)


if __name__ == "__main__":
    serve({"chat": Agents(chat), "responses": Agents(responses), "messages": Agents(messages)})
