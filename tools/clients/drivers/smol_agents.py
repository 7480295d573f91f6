"""smolagents: ``ToolCallingAgent``, which wants every answer as a call of ``final_answer`` and echoes calls as text."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Mapping
from typing import Any

from driver import REPORT_SCHEMA, TOOLS, Client, Report, Task, serve
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


class Agents(Client):
    """An agent on chat completions; it is synchronous, so each conversation has a thread."""

    def _model(self, task: Task) -> OpenAIServerModel:
        extra: Mapping[str, Any] = {"extra_body": dict(task.extra)} if task.extra else {}
        options = {"max_retries": 1}
        return OpenAIServerModel(
            "policy", api_base=task.openai_url, api_key=task.api_key, client_kwargs=options, retry=False, **extra
        )

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        return await asyncio.to_thread(self._talk, task, questions, has_tools=has_tools, is_stream=is_stream)

    def _talk(self, task: Task, questions: tuple[str, ...], *, has_tools: bool, is_stream: bool) -> list[str]:
        tools = [tool(function) for function in TOOLS.values()] if has_tools else []
        agent = ToolCallingAgent(tools, self._model(task), stream_outputs=is_stream, max_steps=4, verbosity_level=0)
        return [str(agent.run(question, reset=False)) for question in questions]

    async def report(self, task: Task, question: str) -> Report:
        schema = {"name": "report", "schema": REPORT_SCHEMA, "strict": True}
        answer = await asyncio.to_thread(
            self._model(task).generate,
            [{"role": "user", "content": [{"type": "text", "text": question}]}],
            response_format={"type": "json_schema", "json_schema": schema},
        )
        return json.loads(answer.content)

    async def hang_up(self, task: Task, question: str) -> None:
        await asyncio.to_thread(self._hang_up, task, question)

    def _hang_up(self, task: Task, question: str) -> None:
        deltas = self._model(task).generate_stream(
            [{"role": "user", "content": [{"type": "text", "text": question}]}],
        )
        for delta in deltas:
            if delta.content:
                break
        deltas.close()
        gc.collect()  # the SDK's stream is part of a cycle: closing the generator alone leaves the connection open


if __name__ == "__main__":
    serve({"chat": Agents()})
