"""``ArealOpenAI``: an ``AsyncOpenAI`` on an engine in this process. Requires ``openai``, version 2 or 3."""

from __future__ import annotations

from typing import Any, Self

import openai
from openai.resources.chat import AsyncChat

from areal_actors.direct.chat import Chat
from areal_actors.direct.rewards import HasRewards
from areal_actors.direct.trajectory import DirectSession, EngineLike, TokenizerLike
from areal_actors.direct.transport import create_http_client, http_library_of

__all__ = ["ArealOpenAI"]

_BASE_URL = "http://direct/v1"


class ArealOpenAI(HasRewards, openai.AsyncOpenAI):
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
        seed: int = 0,
        direct: DirectSession | None = None,
        **options: Any,
    ) -> None:
        """Start a trajectory.

        Args:
            engine: an engine, the ref of a generation actor, or the result of ``open_inference``.
            tokenizer: a fast tokenizer, a model's directory or a renderer; not needed if the engine has one.
            seed: keys the samples.
            direct: a trajectory to share; by default, a new one.
            options: of ``AsyncOpenAI``, such as ``timeout`` or ``max_retries``.

        Raises:
            ConfigError: there is no engine, or no tokenizer.
        """
        self.direct = direct or DirectSession(engine, tokenizer, seed=seed)
        options.setdefault("api_key", self.direct.api_key)
        options.setdefault("base_url", _BASE_URL)
        if options.get("http_client") is None:
            options["http_client"] = create_http_client(self.direct.app, http_library_of(openai))
        super().__init__(**options)

    @property
    def chat(self) -> AsyncChat:
        """The chat resource, as in ``AsyncOpenAI``, but ``model`` is optional."""
        return Chat(self)

    def copy(self, **options: Any) -> Self:
        """Return a client with other options and the same trajectory."""
        # The SDK passes these to the constructor of the copy.
        options["_extra_kwargs"] = {**options.get("_extra_kwargs", {}), "direct": self.direct}
        return super().copy(**options)

    with_options = copy

    async def request(self, *args: Any, **kwargs: Any) -> Any:
        """Send a request, and keep the SDK's object of its answer."""
        answer = await super().request(*args, **kwargs)
        self.remember(answer)
        return answer
