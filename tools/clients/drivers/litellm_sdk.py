"""LiteLLM's functions: the message object goes back as it is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import litellm
from driver import TOOL_SCHEMAS, TOOLS, Client, Report, Task, leave_at_first, run_tool, serve
from pydantic import BaseModel

CHAT_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": TOOLS[name].__doc__, "parameters": TOOL_SCHEMAS[name]},
    }
    for name in TOOLS
]
RESPONSES_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": TOOLS[name].__doc__, "parameters": TOOL_SCHEMAS[name]}
    for name in TOOLS
]


class ReportModel(BaseModel):
    """A report on a city."""

    city: str
    degrees: int


class Completion(Client):
    """``acompletion`` with a provider: OpenAI's chat completions or Anthropic's Messages."""

    def __init__(self, provider: str) -> None:
        self._provider = provider

    def _fields(self, task: Task, messages: list[Any], **fields: Any) -> dict[str, Any]:
        base = task.openai_url if self._provider == "openai" else task.anthropic_url
        extra = {"extra_body": dict(task.extra)} if task.extra else {}
        common = {"model": f"{self._provider}/policy", "api_base": base, "api_key": task.api_key, "num_retries": 0}
        return {**common, "max_retries": 1, "max_tokens": 512, "messages": messages, **extra, **fields}

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        messages: list[Any] = []
        answers = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            answers.append(await self._turn(task, messages, has_tools=has_tools, is_stream=is_stream))
        return answers

    async def _turn(self, task: Task, messages: list[Any], *, has_tools: bool, is_stream: bool) -> str:
        while True:
            fields = self._fields(task, messages, **({"tools": CHAT_TOOLS} if has_tools else {}))
            message = (await self._complete(fields, is_stream=is_stream)).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = await run_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    async def _complete(self, fields: dict[str, Any], *, is_stream: bool) -> Any:
        if not is_stream:
            return await litellm.acompletion(**fields)
        chunks = [chunk async for chunk in await litellm.acompletion(**fields, stream=True)]
        return litellm.stream_chunk_builder(chunks, messages=fields["messages"])

    async def report(self, task: Task, question: str) -> Report:
        fields = self._fields(task, [{"role": "user", "content": question}], response_format=ReportModel)
        return json.loads((await litellm.acompletion(**fields)).choices[0].message.content)

    async def hang_up(self, task: Task, question: str) -> None:
        fields = self._fields(task, [{"role": "user", "content": question}])
        stream = await litellm.acompletion(**fields, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.aclose()


class Responses(Client):
    """``aresponses``: the output items go back as dictionaries."""

    def _fields(self, task: Task, items: Any, **fields: Any) -> dict[str, Any]:
        extra = {"extra_body": dict(task.extra)} if task.extra else {}
        common = {"model": "openai/policy", "api_base": task.openai_url, "api_key": task.api_key, "input": items}
        return {**common, **extra, **fields}

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        items: list[Any] = []
        answers = []
        for question in questions:
            items.append({"role": "user", "content": question})
            answers.append(await self._turn(task, items, has_tools=has_tools, is_stream=is_stream))
        return answers

    async def _turn(self, task: Task, items: list[Any], *, has_tools: bool, is_stream: bool) -> str:
        while True:
            fields = self._fields(task, items, **({"tools": RESPONSES_TOOLS} if has_tools else {}))
            response = await self._respond(fields, is_stream=is_stream)
            output = [item if isinstance(item, dict) else item.model_dump() for item in response.output]
            items += output
            calls = [item for item in output if item["type"] == "function_call"]
            if not calls:
                parts = [part for item in output if item["type"] == "message" for part in item["content"]]
                return "".join(part["text"] for part in parts)
            for call in calls:
                result = await run_tool(call["name"], json.loads(call["arguments"]))
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})

    async def _respond(self, fields: dict[str, Any], *, is_stream: bool) -> Any:
        if not is_stream:
            return await litellm.aresponses(**fields)
        events = [event async for event in await litellm.aresponses(**fields, stream=True)]
        return events[-1].response

    async def report(self, task: Task, question: str) -> Report:
        response = await litellm.aresponses(**self._fields(task, question, text_format=ReportModel))
        (message,) = [item for item in response.output if item.type == "message"]
        return json.loads(message.content[0].text)

    async def hang_up(self, task: Task, question: str) -> None:
        async def events() -> AsyncIterator[Any]:
            async for event in await litellm.aresponses(**self._fields(task, question), stream=True):
                yield event

        # For a model that it does not know, LiteLLM asks for the whole answer, and makes a stream of it afterwards.
        await leave_at_first(events(), lambda event: event.type == "response.output_text.delta", patience_seconds=5)


if __name__ == "__main__":
    serve({"chat": Completion("openai"), "responses": Responses(), "messages": Completion("anthropic")})
