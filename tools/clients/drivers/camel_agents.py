"""CAMEL: ``ChatAgent`` calls the tools and remembers."""

from __future__ import annotations

from typing import Any

from camel.agents import ChatAgent
from camel.models import OpenAICompatibleModel
from camel.toolkits import FunctionTool
from camel.utils import BaseTokenCounter
from driver import TOOLS, Client, Report, Task, leave_at_first, serve
from pydantic import BaseModel


class ReportModel(BaseModel):
    """A report on a city."""

    city: str
    degrees: int


class Counter(BaseTokenCounter):
    """Characters: CAMEL's own counter would fetch an encoding from the network."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        return sum(len(str(message.get("content"))) for message in messages)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


class Agents(Client):
    """An agent on chat completions."""

    def _agent(self, task: Task, *, is_stream: bool = False, has_tools: bool = False) -> ChatAgent:
        config: dict[str, Any] = {"extra_body": dict(task.extra)} if task.extra else {}
        if is_stream:
            config |= {"stream": True, "stream_options": {"include_usage": True}}
        model = OpenAICompatibleModel(
            model_type="policy",
            model_config_dict=config,
            url=task.openai_url,
            api_key=task.api_key,
            token_counter=Counter(),
            max_retries=1,
        )
        tools: Any = [FunctionTool(function) for function in TOOLS.values()] if has_tools else []
        return ChatAgent("Be kind.", model=model, tools=tools, token_limit=1_000_000, retry_attempts=1)

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        agent = self._agent(task, is_stream=is_stream, has_tools=has_tools)
        return [await self._turn(agent, question, is_stream=is_stream) for question in questions]

    async def _turn(self, agent: ChatAgent, question: str, *, is_stream: bool) -> str:
        response: Any = await agent.astep(question)
        if not is_stream:
            return response.msgs[0].content
        return "".join([chunk.msgs[0].content or "" async for chunk in response if chunk.msgs])

    async def report(self, task: Task, question: str) -> Report:
        response = await self._agent(task).astep(question, response_format=ReportModel)
        return response.msgs[0].parsed.model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        response: Any = await self._agent(task, is_stream=True).astep(question)
        await leave_at_first(response, lambda chunk: chunk.msgs and chunk.msgs[0].content)


if __name__ == "__main__":
    serve({"chat": Agents()})
