"""The OpenAI Agents SDK: its runner calls the tools, and ``to_input_list()`` is its memory."""

from __future__ import annotations

from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from driver import TOOLS, Client, Report, Task, serve
from pydantic import BaseModel


class ReportModel(BaseModel):
    """What is asked for."""

    city: str
    degrees: int


class Agents(Client):
    """An agent on one of the SDK's two models."""

    def __init__(self, model: type[OpenAIChatCompletionsModel | OpenAIResponsesModel]) -> None:
        self._model = model

    def _agent(self, task: Task, **options: Any) -> Agent[Any]:
        client = openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, max_retries=1)
        settings = ModelSettings(extra_body=task.extra)
        model = self._model(model="policy", openai_client=client)
        return Agent(name="Agent", instructions="Be kind.", model=model, model_settings=settings, **options)

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        tools = [function_tool(function) for function in TOOLS.values()] if has_tools else []
        agent = self._agent(task, tools=tools)
        history: list[Any] = []
        answers = []
        for question in questions:
            asked = [*history, {"role": "user", "content": question}]
            if is_stream:
                result: Any = Runner.run_streamed(agent, asked)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, asked)
            answers.append(str(result.final_output))
            history = result.to_input_list()
        return answers

    async def report(self, task: Task, question: str) -> Report:
        result = await Runner.run(self._agent(task, output_type=ReportModel), question)
        return result.final_output.model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        result = Runner.run_streamed(self._agent(task), question)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and "delta" in event.data.type:
                result.cancel()


if __name__ == "__main__":
    serve({"chat": Agents(OpenAIChatCompletionsModel), "responses": Agents(OpenAIResponsesModel)})
