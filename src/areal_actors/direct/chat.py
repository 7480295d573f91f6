"""Chat completions of OpenAI's SDK in which ``model`` may be left out: an engine in this process has but one."""

from __future__ import annotations

from typing import Any

from openai.resources.chat import AsyncChat, AsyncCompletions

__all__ = ["Chat"]

_MODEL = "default"


class _Completions(AsyncCompletions):
    """The SDK's methods, as they are but for the default."""

    async def create(self, *, model: str = _MODEL, **options: Any) -> Any:
        return await super().create(model=model, **options)

    async def parse(self, *, model: str = _MODEL, **options: Any) -> Any:
        return await super().parse(model=model, **options)

    def stream(self, *, model: str = _MODEL, **options: Any) -> Any:
        return super().stream(model=model, **options)


class Chat(AsyncChat):
    """``client.chat``."""

    @property
    def completions(self) -> AsyncCompletions:
        """``client.chat.completions``."""
        return _Completions(self._client)
