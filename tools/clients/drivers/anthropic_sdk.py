"""Anthropic's SDK: Messages, its own tool runner where it has one, content blocks echoed as they are."""

from __future__ import annotations

from typing import Any

import anthropic
from driver import REPORT_SCHEMA, TOOL_SCHEMAS, TOOLS, Client, Report, Task, run_tool, serve

_TOOLS: list[Any] = [
    {"name": name, "description": TOOLS[name].__doc__, "input_schema": TOOL_SCHEMAS[name]} for name in TOOLS
]
_REPORT: dict[str, Any] = {"name": "report", "description": "Report.", "input_schema": REPORT_SCHEMA}


def connect(task: Task) -> anthropic.AsyncAnthropic:
    """A client of the task's session."""
    return anthropic.AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key, max_retries=1)


class Messages(Client):
    """``messages``: the content blocks go back as they are."""

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        async with connect(task) as client:
            messages: list[Any] = []
            answers = []
            for question in questions:
                messages.append({"role": "user", "content": question})
                answers.append(await self._turn(client, task, messages, has_tools=has_tools, is_stream=is_stream))
            return answers

    async def _turn(
        self, client: anthropic.AsyncAnthropic, task: Task, messages: list[Any], *, has_tools: bool, is_stream: bool
    ) -> str:
        while True:
            fields: dict[str, Any] = {"model": "policy", "max_tokens": 512, "messages": messages}
            fields["extra_body"] = task.extra
            if has_tools:
                fields["tools"] = _TOOLS
            if is_stream:
                async with client.messages.stream(**fields) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**fields)
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": await run_tool(call.name, call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})

    async def report(self, task: Task, question: str) -> Report:
        async with connect(task) as client:
            answer = await client.messages.create(
                model="policy",
                max_tokens=512,
                messages=[{"role": "user", "content": question}],
                tools=[_REPORT],
                tool_choice={"type": "tool", "name": "report"},
            )
            return next(block.input for block in answer.content if block.type == "tool_use")

    async def hang_up(self, task: Task, question: str) -> None:
        async with connect(task) as client:
            messages: list[Any] = [{"role": "user", "content": question}]
            stream = await client.messages.create(model="policy", max_tokens=512, messages=messages, stream=True)
            async for event in stream:
                if event.type == "content_block_delta":
                    break
            await stream.close()


if __name__ == "__main__":
    serve({"messages": Messages()})
