"""LangChain: ``create_agent`` calls the tools, and its list of messages is its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from driver import TOOLS, Client, Report, Task, serve
from langchain.agents import create_agent
from langchain.messages import HumanMessage
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class ReportModel(BaseModel):
    """A report on a city."""

    city: str
    degrees: int


def chat(task: Task, **options: Any) -> BaseChatModel:
    """Chat completions."""
    common: dict[str, Any] = {"model": "policy", "base_url": task.openai_url, "api_key": task.api_key}
    return ChatOpenAI(**common, extra_body=task.extra, max_retries=1, **options)


def responses(task: Task, **options: Any) -> BaseChatModel:
    """Responses."""
    return chat(task, use_responses_api=True, **options)


def messages(task: Task, **options: Any) -> BaseChatModel:
    """Anthropic's Messages."""
    extra = {"extra_body": task.extra} if task.extra else {}
    common: dict[str, Any] = {"model": "policy", "base_url": task.anthropic_url, "api_key": task.api_key}
    return ChatAnthropic(**common, max_tokens=512, max_retries=1, model_kwargs=extra, **options)


class Graph(Client):
    """An agent on one of the chat models."""

    def __init__(self, model: Callable[..., BaseChatModel]) -> None:
        self._model = model

    async def talk(self, task: Task, *questions: str, has_tools: bool = False, is_stream: bool = False) -> list[str]:
        model = self._model(task, streaming=is_stream)
        agent = create_agent(model, list(TOOLS.values()) if has_tools else [], system_prompt="Be kind.")
        history: list[Any] = []
        answers = []
        for question in questions:
            state = await agent.ainvoke({"messages": [*history, HumanMessage(question)]})
            history = state["messages"]
            answers.append(history[-1].text)
        return answers

    async def report(self, task: Task, question: str) -> Report:
        return (await self._model(task).with_structured_output(ReportModel).ainvoke(question)).model_dump()

    async def hang_up(self, task: Task, question: str) -> None:
        chunks = self._model(task).astream(question)
        async for chunk in chunks:
            if chunk.text:
                break
        await chunks.aclose()


if __name__ == "__main__":
    serve({"chat": Graph(chat), "responses": Graph(responses), "messages": Graph(messages)})
