"""``AgentSession``: all model requests of the code inside the block form one trajectory, whichever library sends them.

The code that sends requests need not know of the session: ``attribution`` assigns requests to sessions. Batches are in
``agent_runner``; ``OpenAIProxyClient`` is the client for programs that hold the admin key and export rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from random import Random
from types import TracebackType
from typing import Self

import httpx
from attrs import field, frozen

from areal_actors.cache import parse_reward
from areal_actors.client.attribution import Attribution, attributed_to, parse_root
from areal_actors.client.hooks import install_hooks
from areal_actors.client.http import RetryPolicy
from areal_actors.client.session import ProxySession
from areal_actors.errors import ConfigError


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


class AgentSession(ProxySession):
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
        arguments = {"task_id": task_id, "group_id": group_id}
        super().__init__(arguments, http_client=http_client, retries=retries, random=random)
        self._service = (base_url, api_key)
        self._environment = os.environ if environment is None else environment
        self._context = ExitStack()

    async def __aenter__(self) -> Self:
        """Start the session, after waiting for capacity if there is none.

        Raises:
            ConfigError: no proxy is configured.
            Unauthorized: the key cannot start sessions, or there is none and the server requires one.
            Unavailable: the proxy does not answer.
        """
        service = find_service(*self._service, self._environment)
        await self._start(service.root, service.api_key, is_patient=True)
        install_hooks()
        attribution = Attribution.to_session(self.session_id, self.api_key, service.root)
        self._context.enter_context(attributed_to(attribution))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session unless it was ended, as ``ProxySession`` does."""
        self._context.close()
        await super().__aexit__(kind, error, trace)

    async def finalize(self, reward: object) -> int:
        """Reward the last completed interaction, end the session, and return the number of its interactions.

        Raises:
            RewardError: the reward is not a finite number.
            InvalidRequest: the session has no interaction to reward.
        """
        return await self._end({"final_reward": parse_reward(reward)})
