"""Instructor: structured output by a forced tool, and a second request where the first answer did not fit."""

from __future__ import annotations

import instructor
import openai
from driver import Client, NotApplicable, Report, Task, serve
from pydantic import BaseModel


class ReportModel(BaseModel):
    """A report on a city."""

    city: str
    degrees: int


class Structured(Client):
    """Only structured output: Instructor holds no conversations."""

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        if len(questions) > 1 or has_tools or is_stream or task.scenario in ("single_turn", "by_key"):
            raise NotApplicable("it asks for structured output only")
        return [str(await self.report(task, questions[0]))]

    async def report(self, task: Task, question: str) -> Report:
        sdk = openai.AsyncOpenAI(base_url=task.openai_url, api_key=task.api_key, max_retries=1)
        client = instructor.from_openai(sdk)
        report = await client.chat.completions.create(
            model="policy",
            response_model=ReportModel,
            messages=[{"role": "user", "content": question}],
            extra_body=task.extra,
            max_retries=1,
        )
        return report.model_dump()


if __name__ == "__main__":
    serve({"chat": Structured()})
