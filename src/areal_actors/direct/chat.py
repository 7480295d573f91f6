"""Chat completions of OpenAI's SDK with an optional ``model``, because an engine in this process has only one."""

from __future__ import annotations

from typing import Any

from openai.resources.chat import AsyncChat, AsyncCompletions

__all__ = ["Chat"]

_MODEL = "default"


class _Completions(AsyncCompletions):
    """The SDK's methods with a default for ``model``."""

    async def create(self, *, model: str = _MODEL, **options: Any) -> Any:
        return await super().create(model=model, **options)

    async def parse(self, *, model: str = _MODEL, **options: Any) -> Any:
        return await super().parse(model=model, **options)

    def stream(self, *, model: str = _MODEL, **options: Any) -> Any:
        return super().stream(model=model, **options)


class Chat(AsyncChat):
    """The ``client.chat`` resource."""

    @property
    def completions(self) -> AsyncCompletions:
        """The ``client.chat.completions`` resource."""
        return _Completions(self._client)
