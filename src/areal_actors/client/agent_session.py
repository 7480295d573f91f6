"""``AgentSession``: whatever the code inside the block asks the model is one trajectory, whichever library sends it.

Who sends requests need not know of the session: ``attribution`` says how they are told apart. Batches are in
``agent_runner``; ``OpenAIProxyClient`` is the client of those who hold the administrator's key and export rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Self

import httpx
from attrs import field, frozen

from areal_actors.cache import parse_reward
from areal_actors.client.attribution import Attribution, attributed_to, parse_root
from areal_actors.client.calls import ControlCalls
from areal_actors.client.endings import end_block
from areal_actors.client.hooks import hooked
from areal_actors.client.retries import RetryPolicy
from areal_actors.domain import InteractionId, SessionId, merge_numbers
from areal_actors.errors import ConfigError, InvalidRequest, NotFound, SessionEnded, Unauthorized

__all__ = ["AgentSession", "Service", "find_service"]

_IS_OVER = (NotFound, SessionEnded, Unauthorized)
"""What ending a session meets that was ended and consumed before: it is forgotten, and its key with it."""


@frozen(kw_only=True)
class Service:
    """Where sessions are started, and with which key, if there is one."""

    root: str
    """The proxy's URL, without ``/v1``."""
    api_key: str | None = field(default=None, repr=False)


def find_service(base_url: str | None, api_key: str | None, environment: Mapping[str, str]) -> Service:
    """What was given, else ``AREAL_BASE_URL`` with ``AREAL_API_KEY``, else the variables of OpenAI's clients.

    A key of OpenAI's own is not sent to a proxy that ``AREAL_BASE_URL`` names.

    Raises:
        ConfigError: nothing names a proxy.
    """
    own = environment.get("AREAL_BASE_URL") or None
    found = base_url or own or environment.get("OPENAI_BASE_URL")
    if not found:
        raise ConfigError("base_url: nothing names the proxy; pass base_url, or set OPENAI_BASE_URL or AREAL_BASE_URL.")
    key = api_key or environment.get("AREAL_API_KEY") or None
    if key is None and (base_url is not None or own is None):
        key = environment.get("OPENAI_API_KEY") or None
    return Service(root=parse_root(found), api_key=key)


class AgentSession:
    """One trajectory. Inside ``async with``, every request to the proxy belongs to it.

    ::

        async with AgentSession() as session:
            answer = await my_agent.run(prompt)      # reads OPENAI_BASE_URL, and knows nothing of sessions
            await session.finalize(1.0)

    Requests of httpx, httpx2, aiohttp and requests are attributed by a context variable, also in tasks that the block
    starts and in threads of ``asyncio.to_thread`` and ``anyio.to_thread``. Others are passed ``base_url`` and
    ``api_key``. Of sessions within each other the innermost counts. A session is used once.

    The session ends with the block. If the block fails or is cancelled it ends as well, without a final reward: rewards
    that were set before stay, and none is added. A session that was finalized inside, by whatever client, is left as
    it is.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        task_id: str = "session",
        group_id: str | None = None,
        http_client: httpx.AsyncClient | None = None,
        retries: RetryPolicy | None = None,
        random: Random | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describe a session; it starts with ``async with``.

        Args:
            base_url: the proxy's URL, with or without ``/v1``; see ``find_service`` for where it comes from otherwise.
            api_key: opens ``start_session``; none is sent where none is found, and the server decides.
            task_id: becomes the readable prefix of the session's id.
            group_id: the group that the session belongs to.
            http_client: sends what the session itself has to say; left open.
            retries: how often that is tried again.
            random: source of jitter.
            environment: read when the block is entered, in place of ``os.environ``.
        """
        self._given = (base_url, api_key)
        self._environment = os.environ if environment is None else environment
        self._arguments = {"task_id": task_id, "group_id": group_id}
        self._call_options: dict[str, Any] = {"http_client": http_client, "retries": retries, "random": random}
        self._calls: ControlCalls | None = None
        self._attribution: Attribution | None = None
        self._completion_key = ""
        self._context = ExitStack()
        self._is_ended = False

    async def __aenter__(self) -> Self:
        """Start the session, after waiting for room if there is none.

        Raises:
            ConfigError: nothing names the proxy.
            Unauthorized: the key opens no sessions, or there is none and the server wants one.
            Unavailable: nobody answers there.
        """
        if self._calls is not None:
            raise InvalidRequest("This AgentSession was used before; make another one for another trajectory.")
        service = find_service(*self._given, self._environment)
        self._calls = ControlCalls(service.root, **self._call_options)
        self._calls.open()
        try:
            started = await self._calls.post(
                "rl/start_session",
                self._arguments,
                key=service.api_key,
                is_repeatable=False,
                is_patient=True,
                undo=self._abandon,
            )
        except BaseException:
            await self._calls.close()
            raise
        self._completion_key = started["completion_key"]
        self._attribution = Attribution.to_session(SessionId(started["session_id"]), started["api_key"], service.root)
        self._context.enter_context(hooked())
        self._context.enter_context(attributed_to(self._attribution))
        return self

    async def _abandon(self, started: Mapping[str, Any]) -> None:
        """End a session that was started for somebody who is gone."""
        assert self._calls is not None
        await self._calls.post("rl/end_session", key=started["api_key"])

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session, unless it was ended; an error of the block is never hidden by one of the ending."""
        self._context.close()
        assert self._calls is not None
        end = None if self._is_ended else partial(self._end, {})
        await end_block(self._calls, end, error=error, is_over=_IS_OVER)

    @property
    def session_id(self) -> SessionId:
        """The session's id; it opens the session for completions as a part of its URL, so keep it to yourself."""
        return self._open.session

    @property
    def api_key(self) -> str:
        """The key that opens the session for everything: completions, rewards and its end."""
        return self._open.key

    @property
    def completion_key(self) -> str:
        """The key for agents that are not trusted: it asks the model, and can neither reward nor end the session."""
        _ = self._open
        return self._completion_key

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as ``base_url``; ends in ``/v1`` and names the session."""
        _, calls = self._open, self._calls
        assert calls is not None
        return f"{calls.root}/{self.session_id}/v1"

    @property
    def _open(self) -> Attribution:
        if self._attribution is None:
            raise InvalidRequest("The session has not started; use 'async with AgentSession()'.")
        return self._attribution

    async def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Reward one interaction, named by the id of its completion; setting twice replaces.

        Raises:
            NotFound: the session has no such interaction.
            RewardError: the reward is not a finite number.
        """
        await self._reward({"interaction_id": interaction_id}, reward)

    async def set_last_reward(self, reward: Any) -> InteractionId:
        """Reward the last completed interaction; returns its id. Raises ``InvalidRequest`` if there is none."""
        return await self._reward({}, reward)

    async def log(self, **numbers: float) -> None:
        """Log named numbers of the session: ``log(format_ok=1.0)``. A name that is logged again gets the new value.

        Their means over the sessions of a step stand in its metrics as ``rollout/<name>``. Raises ``InvalidRequest``
        for a value that is no finite number.
        """
        await self._post("log_metrics", {"metrics": merge_numbers({}, numbers)})

    async def finalize(self, reward: Any) -> int:
        """Reward the last completed interaction and end the session; returns the number of its interactions.

        Raises:
            RewardError: the reward is not a finite number.
            InvalidRequest: the session has no interaction to reward.
        """
        return await self._end({"final_reward": parse_reward(reward)})

    async def _reward(self, which: Mapping[str, str], reward: Any) -> InteractionId:
        reply = await self._post("set_reward", {**which, "reward": parse_reward(reward)})
        return InteractionId(reply["interaction_id"])

    async def _end(self, body: Mapping[str, Any]) -> int:
        reply = await self._post("end_session", body)
        self._is_ended = True
        return int(reply["interaction_count"])

    async def _post(self, operation: str, body: Mapping[str, Any]) -> dict[str, Any]:
        key = self._open.key
        assert self._calls is not None
        return await self._calls.post(f"rl/{operation}", body, key=key)
