"""``ArealOpenAI``: an ``AsyncOpenAI`` on an engine in this process. Requires ``openai``, version 2 or 3."""

from __future__ import annotations

from typing import Any

import openai
from openai.resources.chat import AsyncChat, AsyncCompletions

from areal_actors.direct.trajectory import DirectClient, DirectSession, EngineLike, TokenizerLike


class ArealOpenAI(DirectClient, openai.AsyncOpenAI):
    """A client of OpenAI's SDK whose requests form one trajectory.

    ::

        client = ArealOpenAI(engine=engine, tokenizer=tokenizer)
        answer = await client.chat.completions.create(model="default", messages=messages)
        client.set_last_reward(1.0)
        client.apply_reward_discount(turn_discount=0.9)
        rows = client.export_interactions(style="individual")
    """

    def __init__(
        self,
        engine: EngineLike | None = None,
        tokenizer: TokenizerLike = None,
        *,
        tool_call_parser: str | None = None,  # noqa: ARG002 - recognised from the chat template
        reasoning_parser: str | None = None,  # noqa: ARG002 - the same
        chat_template_type: str | None = None,  # noqa: ARG002 - prompts always continue the tokens of their parents
        engine_max_tokens: int | None = None,
        seed: int = 0,
        direct: DirectSession | None = None,
        **options: Any,
    ) -> None:
        """Start a trajectory.

        Args:
            engine: an engine, the ref of a generation actor, or the result of ``open_inference``.
            tokenizer: a fast tokenizer, a model's directory or a renderer; not needed if the engine has one.
            tool_call_parser: accepted from programs written for AReaL and not needed: formats of tool calls are
                recognised from the chat template.
            reasoning_parser: the same for reasoning.
            chat_template_type: the same: prompts continue the tokens of their parents, as AReaL's ``concat`` does.
            engine_max_tokens: bound on the tokens of a prompt and its answer; by default that of the engine.
            seed: keys the samples.
            direct: a trajectory to share; by default, a new one.
            options: of ``AsyncOpenAI``, such as ``timeout`` or ``max_retries``.

        Raises:
            ConfigError: there is no engine, or no tokenizer.
        """
        self.direct = direct or DirectSession(engine, tokenizer, seed=seed, max_length=engine_max_tokens)
        super().__init__(**self.direct.client_options(openai, base_url="http://direct/v1", given=options))

    @property
    def chat(self) -> AsyncChat:
        """The chat resource, as in ``AsyncOpenAI``, but ``model`` is optional."""
        return Chat(self)


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
