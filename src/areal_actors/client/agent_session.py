"""``AgentSession``: all model requests of the code inside the block form one trajectory, whichever library sends them.

The code that sends requests need not know of the session: ``attribution`` assigns requests to sessions. Batches are in
``agent_runner``; ``OpenAIProxyClient`` is the client for programs that hold the admin key and export rows.
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
from areal_actors.client.calls import ControlCalls, end_block
from areal_actors.client.hooks import hooked
from areal_actors.client.http import RetryPolicy
from areal_actors.domain import InteractionId, SessionId, merge_numbers
from areal_actors.errors import ConfigError, InvalidRequest, NotFound, SessionEnded, Unauthorized

_IS_OVER = (NotFound, SessionEnded, Unauthorized)
"""Errors of ending a session that was already ended and consumed: it is forgotten, together with its key."""


@frozen(kw_only=True)
class Service:
    """The proxy at which sessions are started, and the key to do so, if there is one."""

    root: str
    """The proxy's URL, without ``/v1``."""
    api_key: str | None = field(default=None, repr=False)


def find_service(base_url: str | None, api_key: str | None, environment: Mapping[str, str]) -> Service:
    """Return the proxy to use: from the arguments, else from the environment.

    ``AREAL_BASE_URL`` with ``AREAL_API_KEY`` take precedence over the variables of OpenAI's clients. ``OPENAI_API_KEY``
    is not sent to a proxy that ``AREAL_BASE_URL`` names.

    Raises:
        ConfigError: neither names a proxy.
    """
    own = environment.get("AREAL_BASE_URL") or None
    found = base_url or own or environment.get("OPENAI_BASE_URL")
    if not found:
        raise ConfigError("base_url: nothing names the proxy; pass base_url, or set OPENAI_BASE_URL or AREAL_BASE_URL.")
    key = api_key or environment.get("AREAL_API_KEY") or None
    # With ``AREAL_BASE_URL``, an ``OPENAI_API_KEY`` is probably a real key of OpenAI's and must not be sent elsewhere.
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
    starts and in threads of ``asyncio.to_thread`` and ``anyio.to_thread``. Other clients need to be passed ``base_url``
    and ``api_key``. Among nested sessions, the innermost one is used. A session can be used once.

    The session ends with the block. If the block fails or is cancelled, the session ends as well, without a final
    reward: rewards that were set before are kept, and none is added. A session that was finalized inside the block, by
    any client, is left as it is.
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
        """Create a session object; the session starts with ``async with``.

        Args:
            base_url: the proxy's URL, with or without ``/v1``; see ``find_service`` for the default.
            api_key: the key for ``start_session``; if none is found, none is sent, and the server decides.
            task_id: becomes the readable prefix of the session's id.
            group_id: the group that the session belongs to.
            http_client: sends the session's control requests; it is not closed.
            retries: how often control requests are retried.
            random: source of jitter.
            environment: read when the block is entered, instead of ``os.environ``.
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
        """Start the session, after waiting for capacity if there is none.

        Raises:
            ConfigError: no proxy is configured.
            Unauthorized: the key cannot start sessions, or there is none and the server requires one.
            Unavailable: the proxy does not answer.
        """
        if self._calls is not None:
            raise InvalidRequest("This AgentSession was used before; make another one for another trajectory.")
        service = find_service(*self._given, self._environment)
        calls = self._calls = ControlCalls(service.root, **self._call_options)
        calls.open()

        async def abandon(started: Mapping[str, Any]) -> None:
            # The caller was cancelled before the session started.
            await calls.post("rl/end_session", key=started["api_key"])

        try:
            started = await self._calls.post(
                "rl/start_session",
                self._arguments,
                key=service.api_key,
                # A repeated start could open a second session, and the first one would occupy capacity until it times
                # out.
                is_repeatable=False,
                is_patient=True,
                undo=abandon,
            )
        except BaseException:
            await self._calls.close()
            raise
        self._completion_key = started["completion_key"]
        self._attribution = Attribution.to_session(SessionId(started["session_id"]), started["api_key"], service.root)
        self._context.enter_context(hooked())
        self._context.enter_context(attributed_to(self._attribution))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session unless it was ended.

        An error of the block is never replaced by an error of ending the session.
        """
        self._context.close()
        assert self._calls is not None
        end = None if self._is_ended else partial(self._end, {})
        await end_block(self._calls, end, error=error, is_over=_IS_OVER)

    @property
    def session_id(self) -> SessionId:
        """The session's id. Keep it secret: as a part of a URL, it gives access to completions in the session."""
        return self._open.session

    @property
    def api_key(self) -> str:
        """The key with full access to the session: completions, rewards and its end."""
        return self._open.key

    @property
    def completion_key(self) -> str:
        """A key for untrusted agents: it can request completions, but can neither reward nor end the session."""
        _ = self._open
        return self._completion_key

    @property
    def base_url(self) -> str:
        """The ``base_url`` for an OpenAI client; it names the session and ends in ``/v1``."""
        _, calls = self._open, self._calls
        assert calls is not None
        return f"{calls.root}/{self.session_id}/v1"

    @property
    def _open(self) -> Attribution:
        if self._attribution is None:
            raise InvalidRequest("The session has not started; use 'async with AgentSession()'.")
        return self._attribution

    async def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Reward one interaction, identified by the id of its completion; setting it again replaces the reward.

        Raises:
            NotFound: the session has no such interaction.
            RewardError: the reward is not a finite number.
        """
        await self._reward({"interaction_id": interaction_id}, reward)

    async def set_last_reward(self, reward: Any) -> InteractionId:
        """Reward the last completed interaction and return its id. Raises ``InvalidRequest`` if there is none."""
        return await self._reward({}, reward)

    async def log(self, **numbers: float) -> None:
        """Log named numbers of the session: ``log(format_ok=1.0)``. Logging a name again replaces its value.

        Their means over the sessions of a step appear in its metrics as ``rollout/<name>``. Raises ``InvalidRequest``
        for a value that is not a finite number.
        """
        await self._post("log_metrics", {"metrics": merge_numbers({}, numbers)})

    async def finalize(self, reward: Any) -> int:
        """Reward the last completed interaction, end the session, and return the number of its interactions.

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
