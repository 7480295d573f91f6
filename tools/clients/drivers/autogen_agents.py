"""AutoGen: ``AssistantAgent`` calls the tools, reflects on their results without tools, and remembers."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from driver import TOOLS, Client, Report, Task, leave_at_first, serve
from pydantic import BaseModel


class ReportModel(BaseModel):
    """A report on a city."""

    city: str
    degrees: int


class Agents(Client):
    """An agent on chat completions."""

    def _agent(self, task: Task, **options: Any) -> AssistantAgent:
        abilities: Any = {
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        }
        extra: Any = {"extra_body": dict(task.extra)} if task.extra else {}
        client = OpenAIChatCompletionClient(
            model="policy",
            base_url=task.openai_url,
            api_key=task.api_key,
            model_info=abilities,
            max_retries=1,
            **extra,
        )
        return AssistantAgent("agent", client, system_message="Be kind.", **options)

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        tools: Any = list(TOOLS.values()) if has_tools else None
        agent = self._agent(task, tools=tools, reflect_on_tool_use=has_tools, model_client_stream=is_stream)
        return [str((await agent.run(task=question)).messages[-1].content) for question in questions]

    async def report(self, task: Task, question: str) -> Report:
        agent = self._agent(task, output_content_type=ReportModel)
        return (await agent.run(task=question)).messages[-1].content.model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        events = self._agent(task, model_client_stream=True).run_stream(task=question)
        await leave_at_first(events, lambda event: isinstance(event, ModelClientStreamingChunkEvent))


if __name__ == "__main__":
    serve({"chat": Agents()})
