"""A session at the proxy over HTTP, from start to export, for episodes in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self

import httpx

from areal_actors.cache.interactions import InteractionWithTokenLogpReward, interactions_of
from areal_actors.client.calls import ControlCalls, end_block
from areal_actors.client.http import RetryPolicy
from areal_actors.domain import Episode, InteractionId, SessionId, merge_numbers
from areal_actors.errors import InvalidRequest
from areal_actors.interchange.episodes import parse_episode


class OpenAIProxyClient:
    """One session. ``async with`` starts and ends it; set rewards inside the block, export rows inside or after it.

    ::

        async with OpenAIProxyClient(url, admin_key=key, task_id="task-7") as session:
            reward = await agent.run(data, base_url=session.base_url, api_key=session.completion_key)
            await session.set_last_reward(reward)
        interactions = await session.export_interactions(discount=0.9)

    Requests that are not idempotent are never sent twice; the others are retried a limited number of times, with
    back-off.
    """

    def __init__(
        self,
        base_url: str,
        *,
        admin_key: str,
        task_id: str = "session",
        api_key: str | None = None,
        group_id: str | None = None,
        group_size: int | None = None,
        position: int | None = None,
        member: int | None = None,
        seed: int | None = None,
        roles: Sequence[str] = (),
        http_client: httpx.AsyncClient | None = None,
        retries: RetryPolicy | None = None,
        random: Random | None = None,
    ) -> None:
        """Create a session object; the session starts with ``async with``.

        Args:
            base_url: the proxy's URL, with or without ``/v1``.
            admin_key: the key for the routes that start and export sessions.
            task_id: becomes the readable prefix of the session's id.
            api_key: a key for the session that the caller chooses; by default a random one is issued.
            group_id: the group that the session belongs to; sessions of a group are compared with one another.
            group_size: how many sessions the group waits for; by default, the service's setting.
            position: the index of the problem, in a service that trains; by default, problems are counted.
            member: the index of the session in its group; by default, members are counted.
            seed: keys the session's samples together with ``position`` and ``member``.
            roles: roles that get a completion key each, in ``role_keys``.
            http_client: used for all requests and not closed; by default, the session creates one.
            retries: how often requests are retried.
            random: source of jitter.
        """
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._admin_key = admin_key
        self._arguments = {
            "task_id": task_id,
            "api_key": api_key,
            "group_id": group_id,
            "group_size": group_size,
            "position": position,
            "member": member,
            "seed": seed,
            "roles": list(roles) or None,
        }
        self._calls = ControlCalls(self._root, http_client=http_client, retries=retries, random=random)
        self._session_id: SessionId | None = None
        self._api_key = ""
        self._completion_key = ""
        self._role_keys: Mapping[str, str] = {}
        self._is_ended = False
        self._assigned: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        """Start the session.

        Raises:
            CapacityExhausted: there was no capacity during all retries.
            Unauthorized: the admin key is wrong.
        """
        if self._session_id is not None:
            raise InvalidRequest(f"Session {self._session_id} was started before; make another client for another one.")
        self._calls.open()
        try:
            started = await self._post("rl/start_session", self._arguments, is_repeatable=False)
        except BaseException:
            await self._calls.close()
            raise
        self._session_id = SessionId(started["session_id"])
        self._api_key = started["api_key"]
        self._completion_key = started["completion_key"]
        self._role_keys = started.get("role_keys", {})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session unless it was ended.

        An error of the block is never replaced by an error of ending the session.
        """
        await end_block(self._calls, None if self._is_ended else self.end_session, error=error)

    @property
    def session_id(self) -> SessionId:
        """The session's id. Keep it secret: as a part of a URL, it gives access to completions in the session."""
        if self._session_id is None:
            raise InvalidRequest("The session has not started; use 'async with OpenAIProxyClient(...)'.")
        return self._session_id

    @property
    def api_key(self) -> str:
        """The key with full access to the session: completions, rewards and its end."""
        _ = self.session_id
        return self._api_key

    @property
    def completion_key(self) -> str:
        """The key for the agent: it can request completions, but can neither reward nor end the session."""
        _ = self.session_id
        return self._completion_key

    @property
    def role_keys(self) -> Mapping[str, str]:
        """The completion keys of ``roles``: a request with one has that role."""
        _ = self.session_id
        return self._role_keys

    @property
    def base_url(self) -> str:
        """The ``base_url`` for an OpenAI client; it names the session and ends in ``/v1``."""
        return f"{self._root}/{self.session_id}/v1"

    @property
    def session_url(self) -> str:
        """An alias of ``base_url``."""
        return self.base_url

    async def set_reward(self, interaction_id: str, reward: float) -> None:
        """Reward one interaction, identified by the id of its completion; setting it again replaces the reward.

        Raises:
            NotFound: the session has no such interaction.
            InvalidRequest: the reward is not a finite number.
        """
        await self._reward({"interaction_id": interaction_id}, reward)

    async def set_last_reward(self, reward: float) -> InteractionId:
        """Reward the last completed interaction and return its id. Raises ``InvalidRequest`` if there is none."""
        return await self._reward({}, reward)

    async def log(self, **numbers: float) -> None:
        """Log named numbers of the session. Raises ``InvalidRequest`` for a value that is not a finite number."""
        await self._post(f"{self.session_id}/rl/log_metrics", {"metrics": merge_numbers({}, numbers)})

    async def _reward(self, which: Mapping[str, str], reward: float) -> InteractionId:
        # Sent in the query, which can carry NaN unlike JSON; ``float`` accepts numpy and torch scalars, which agents
        # often return.
        query = {**which, "reward": repr(float(reward))}
        reply = await self._control("set_reward", query)
        interaction = InteractionId(reply["interaction_id"])
        self._assigned[interaction] = float(reward)
        return interaction

    async def end_session(self, final_reward: float | None = None) -> int:
        """End the session and return the number of its interactions. Ending it twice has no effect.

        ``final_reward``, if given, rewards the last completed interaction.
        """
        query = {} if final_reward is None else {"final_reward": repr(float(final_reward))}
        reply = await self._control("end_session", query)
        self._is_ended = True
        return int(reply["interaction_count"])

    async def export_interactions(
        self, *, discount: float | None = None, style: str | None = None
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Return the session's training rows, each by the interaction that it ends. It can be called again.

        They have tokens, rewards and parents, and no messages: those stay at the proxy. Rewards before propagation are
        known of those that this client has set; the rest of the session's reward counts for the last row. Errors:
        ``export_episode``.
        """
        episode = await self.export_episode(discount=discount, style=style)
        assigned = dict(self._assigned)
        rest = episode.reward - sum(assigned.values())
        if abs(rest) > 1e-9:  # noqa: PLR2004 - more than the rounding of the sum
            last = episode.trajectories[-1].interactions[-1] if episode.trajectories else ""
            assigned[last] = assigned.get(last, 0.0) + rest
        return interactions_of(episode.trajectories, assigned)

    async def export_episode(self, *, discount: float | None = None, style: str | None = None) -> Episode:
        """Return the session's training rows with what was not trained. It can be called again, with another discount.

        Raises:
            Unprocessable: there is no such style, or the rows cannot be built.
            NotFound: the session was exported and forgotten.
        """
        arguments = {"session_id": self.session_id, "discount": discount, "style": style}
        return parse_episode(await self._post("export_trajectories", arguments))

    async def _control(self, operation: str, query: Mapping[str, str]) -> dict[str, Any]:
        return await self._calls.post(f"{self.session_id}/rl/{operation}", {}, key=self._api_key, query=query)

    async def _post(
        self, path: str, body: Mapping[str, Any], *, query: Mapping[str, str] | None = None, is_repeatable: bool = True
    ) -> dict[str, Any]:
        return await self._calls.post(path, body, key=self._admin_key, query=query, is_repeatable=is_repeatable)
