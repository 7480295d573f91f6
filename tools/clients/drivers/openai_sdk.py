"""OpenAI's SDK, 2.x and 3.x: chat completions and Responses, echoing its own objects."""

from __future__ import annotations

import json
from typing import Any

import openai
from driver import TOOL_SCHEMAS, TOOLS, Client, NotApplicable, Report, Task, run_tool, serve
from pydantic import BaseModel

CHAT_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": TOOLS[name].__doc__,
            "parameters": TOOL_SCHEMAS[name],
            "strict": True,
        },
    }
    for name in TOOLS
]
RESPONSES_TOOLS: list[Any] = [
    {
        "type": "function",
        "name": name,
        "description": TOOLS[name].__doc__,
        "parameters": TOOL_SCHEMAS[name],
        "strict": True,
    }
    for name in TOOLS
]


class ReportModel(BaseModel):
    """What is asked for."""

    city: str
    degrees: int


def connect(task: Task) -> openai.AsyncOpenAI:
    """A client of the task's session."""
    return openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, max_retries=1)


class Chat(Client):
    """``chat.completions``: the message object goes back as it is, or as ``model_dump()`` after a stream."""

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        async with connect(task) as client:
            messages: list[Any] = []
            answers = []
            for question in questions:
                messages.append({"role": "user", "content": question})
                answers.append(await self._turn(client, task, messages, has_tools=has_tools, is_stream=is_stream))
            return answers

    async def _turn(
        self, client: openai.AsyncOpenAI, task: Task, messages: list[Any], *, has_tools: bool, is_stream: bool
    ) -> str:
        while True:
            fields = {"model": "policy", "messages": messages, "extra_body": task.extra}
            if has_tools:
                fields["tools"] = CHAT_TOOLS
            if is_stream:
                async with client.chat.completions.stream(**fields) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
                messages.append(message.model_dump())
            else:
                message = (await client.chat.completions.create(**fields)).choices[0].message
                messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = await run_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    async def report(self, task: Task, question: str) -> Report:
        async with connect(task) as client:
            answer = await client.chat.completions.parse(
                model="policy", messages=[{"role": "user", "content": question}], response_format=ReportModel
            )
            return answer.choices[0].message.parsed.model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        async with connect(task) as client:
            messages = [{"role": "user", "content": question}]
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    break
            await stream.close()


class Responses(Client):
    """``responses``: the output items go back as they are."""

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        async with connect(task) as client:
            items: list[Any] = []
            answers = []
            for question in questions:
                items.append({"role": "user", "content": question})
                answers.append(await self._turn(client, task, items, has_tools=has_tools, is_stream=is_stream))
            return answers

    async def _turn(
        self, client: openai.AsyncOpenAI, task: Task, items: list[Any], *, has_tools: bool, is_stream: bool
    ) -> str:
        while True:
            fields = {"model": "policy", "input": items, "extra_body": task.extra}
            if has_tools:
                fields["tools"] = RESPONSES_TOOLS
            if is_stream:
                async with client.responses.stream(**fields) as stream:
                    response = await stream.get_final_response()
                items += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
            else:
                response = await client.responses.create(**fields)
                items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for call in calls:
                result = await run_tool(call.name, json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})

    async def previous_response(self, task: Task) -> None:
        async with connect(task) as client:
            previous: str | None = None
            for number in range(3):
                response = await client.responses.create(
                    model="policy", input=f"[{task.label}] turn {number}", previous_response_id=previous
                )
                previous = response.id
                if f"turn {number}" not in response.output_text:
                    raise AssertionError(response.output_text)

    async def report(self, task: Task, question: str) -> Report:
        async with connect(task) as client:
            response = await client.responses.parse(model="policy", input=question, text_format=ReportModel)
            if response.output_parsed is None:
                raise NotApplicable("nothing was parsed")
            return response.output_parsed.model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        async with connect(task) as client:
            stream = await client.responses.create(model="policy", input=question, stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()


if __name__ == "__main__":
    serve({"chat": Chat(), "responses": Responses()})
