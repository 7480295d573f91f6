"""``ArealAnthropic``: an ``AsyncAnthropic`` on an engine in this process. Requires ``anthropic``."""

from __future__ import annotations

from typing import Any

import anthropic

from areal_actors.direct.trajectory import DirectClient, DirectSession, EngineLike, TokenizerLike


class ArealAnthropic(DirectClient, anthropic.AsyncAnthropic):
    """A client of Anthropic's SDK whose requests form one trajectory.

    ::

        client = ArealAnthropic(engine=engine, tokenizer=tokenizer)
        answer = await client.messages.create(model="default", max_tokens=256, messages=messages)
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
            options: of ``AsyncAnthropic``, such as ``timeout`` or ``max_retries``.

        Raises:
            ConfigError: there is no engine, or no tokenizer.
        """
        self.direct = direct or DirectSession(engine, tokenizer, seed=seed)
        super().__init__(**self.direct.client_options(anthropic, base_url="http://direct", given=options))
