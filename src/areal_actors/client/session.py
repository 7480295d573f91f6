"""Sessions at the proxy over HTTP: what their clients have in common, and ``OpenAIProxyClient``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio
import httpx

from areal_actors.cache import parse_reward
from areal_actors.cache.interactions import InteractionWithTokenLogpReward, interactions_of
from areal_actors.client.attribution import unattributed
from areal_actors.client.http import RetryPolicy, create_http_client, lent_client, send_with_retries
from areal_actors.domain import Episode, InteractionId, SessionId, merge_numbers
from areal_actors.errors import ArealError, InvalidRequest, NotFound, RewardError, SessionEnded, Unauthorized
from areal_actors.interchange.episodes import parse_episode
from areal_actors.lib.exact_json import dump_json, load_json

Reply: TypeAlias = dict[str, Any]
"""The JSON object of an answer."""

_UNDO_SECONDS = 5.0
_END_SECONDS = 10.0
_IS_OVER = (NotFound, SessionEnded, Unauthorized)
"""Errors of ending a session that was already ended and consumed: it is forgotten, together with its key."""


class ProxySession:
    """One session at a proxy, which ends with its block: its keys, its rewards and its end.

    Requests that are not idempotent are never sent twice; the others are retried a limited number of times, with
    back-off. Inside the block, all control requests share one HTTP client; after it, each creates its own.
    """

    def __init__(
        self,
        arguments: Mapping[str, object],
        *,
        http_client: httpx.AsyncClient | None,
        retries: RetryPolicy | None,
        random: Random | None,
    ) -> None:
        """Create a session that is started with ``arguments``; ``http_client`` is not closed, if one is given."""
        self._arguments = arguments
        self._given = http_client
        self._own: httpx.AsyncClient | None = None
        self._retries = retries or RetryPolicy()
        self._random = random or Random()  # noqa: S311 - jitter
        self._root = ""
        self._reply: Reply | None = None
        self._is_ended = False

    async def _start(self, root: str, key: str | None, *, is_patient: bool) -> None:
        """Start the session with ``key`` at the proxy at ``root``."""
        if self._reply is not None:
            raise InvalidRequest(f"This {type(self).__name__} was used before; make another one for another session.")
        self._root = root
        self._own = create_http_client() if self._given is None else None

        async def abandon(started: Reply) -> None:
            # The caller was cancelled before the session started.
            await self._post("rl/end_session", key=str(started["api_key"]))

        try:
            # A repeated start could open a second session, and the first one would occupy capacity until it times out.
            self._reply = await self._post(
                "rl/start_session", self._arguments, key=key, is_repeatable=False, is_patient=is_patient, undo=abandon
            )
        except BaseException:
            await self._close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session unless it was ended, in ten seconds at most, cancelled or not.

        An error of the block is never replaced by an error of ending the session.
        """
        try:
            if not self._is_ended:
                with anyio.move_on_after(_END_SECONDS, shield=True):
                    await self._end({})
        except _IS_OVER:
            pass
        except ArealError:
            if error is None:
                raise
        finally:
            await self._close()

    async def _close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            # This only closes sockets, which does not block.
            with anyio.CancelScope(shield=True):
                await own.aclose()

    @property
    def _started(self) -> Reply:
        if self._reply is None:
            raise InvalidRequest(f"The session has not started; use 'async with {type(self).__name__}(...)'.")
        return self._reply

    @property
    def session_id(self) -> SessionId:
        """The session's id. Keep it secret: as a part of a URL, it gives access to completions in the session."""
        return SessionId(self._started["session_id"])

    @property
    def api_key(self) -> str:
        """The key with full access to the session: completions, rewards and its end."""
        return str(self._started["api_key"])

    @property
    def completion_key(self) -> str:
        """A key for untrusted agents: it can request completions, but can neither reward nor end the session."""
        return str(self._started["completion_key"])

    @property
    def base_url(self) -> str:
        """The ``base_url`` for an OpenAI client; it names the session and ends in ``/v1``."""
        return f"{self._root}/{self.session_id}/v1"

    async def set_reward(self, interaction_id: str, reward: object) -> None:
        """Reward one interaction, identified by the id of its completion; setting it again replaces the reward.

        Raises:
            NotFound: the session has no such interaction.
            RewardError: the reward is not a finite number; of ``OpenAIProxyClient``, ``InvalidRequest``.
        """
        await self._reward({"interaction_id": interaction_id}, reward)

    async def set_last_reward(self, reward: object) -> InteractionId:
        """Reward the last completed interaction and return its id. Raises ``InvalidRequest`` if there is none."""
        return await self._reward({}, reward)

    async def log(self, **numbers: float) -> None:
        """Log named numbers of the session: ``log(format_ok=1.0)``. Logging a name again replaces its value.

        Their means over the sessions of a step appear in its metrics as ``rollout/<name>``. Raises ``InvalidRequest``
        for a value that is not a finite number.
        """
        await self._post("rl/log_metrics", {"metrics": merge_numbers({}, numbers)}, key=self.api_key)

    async def _reward(self, which: Mapping[str, str], reward: object) -> InteractionId:
        body = {**which, "reward": parse_reward(reward)}
        reply = await self._post("rl/set_reward", body, key=self.api_key)
        return InteractionId(reply["interaction_id"])

    async def _end(self, body: Mapping[str, object]) -> int:
        reply = await self._post("rl/end_session", body, key=self.api_key)
        self._is_ended = True
        return int(reply["interaction_count"])

    async def _post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        key: str | None,
        is_repeatable: bool = True,
        is_patient: bool = False,
        undo: Callable[[Reply], Awaitable[object]] | None = None,
    ) -> Reply:
        """Send one request with ``key``, regardless of the session around the caller, and return the answer.

        If the caller is cancelled while the request is in progress, its answer is awaited for a few seconds and passed
        to ``undo``. Raises what ``send_with_retries`` raises.
        """
        content = dump_json({name: value for name, value in (body or {}).items() if value is not None})
        headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        # This request carries its own key, which that of a surrounding session must not replace.
        with unattributed():
            async with lent_client(self._given or self._own) as http:
                send = partial(http.post, f"{self._root}/{path}", content=content, headers=headers)
                response = await send_with_retries(
                    send if undo is None else partial(_send_or_undo, send, undo),
                    policy=self._retries,
                    random=self._random,
                    is_repeatable=is_repeatable,
                    is_patient=is_patient,
                )
        return _parse(response)


def _parse(response: httpx.Response) -> Reply:
    reply: Reply = load_json(response.content)
    return reply


async def _send_or_undo(
    send: Callable[[], Awaitable[httpx.Response]], undo: Callable[[Reply], Awaitable[object]]
) -> httpx.Response:
    """Send a request, and undo its effect if the caller is cancelled before the answer arrives."""
    outcome: list[httpx.Response | Exception] = []
    shield, is_over = anyio.CancelScope(shield=True), anyio.Event()

    async def run() -> None:
        with shield:
            try:
                outcome.append(await send())
            except Exception as error:  # noqa: BLE001 - raised below, so that it is not wrapped in an exception group
                outcome.append(error)
        is_over.set()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                await is_over.wait()
            except anyio.get_cancelled_exc_class():
                # The request continues for a few seconds, then the cancellation is propagated.
                shield.deadline = anyio.current_time() + _UNDO_SECONDS
                raise
    except BaseException:
        if outcome and isinstance(late := outcome[0], httpx.Response) and late.is_success:
            with anyio.move_on_after(_UNDO_SECONDS, shield=True):
                await undo(_parse(late))
        raise
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _parse_reward(reward: object) -> float:
    try:
        return parse_reward(reward)
    except RewardError as error:
        # As the proxy answers.
        raise InvalidRequest(str(error), param="reward") from error


class OpenAIProxyClient(ProxySession):
    """One session. ``async with`` starts and ends it; set rewards inside the block, export rows inside or after it.

    ::

        async with OpenAIProxyClient(url, admin_key=key, task_id="task-7") as session:
            reward = await agent.run(data, base_url=session.base_url, api_key=session.completion_key)
            await session.set_last_reward(reward)
        interactions = await session.export_interactions(discount=0.9)
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
        arguments = {
            "task_id": task_id,
            "api_key": api_key,
            "group_id": group_id,
            "group_size": group_size,
            "position": position,
            "member": member,
            "seed": seed,
            "roles": list(roles) or None,
        }
        super().__init__(arguments, http_client=http_client, retries=retries, random=random)
        self._base_url = base_url
        self._admin_key = admin_key
        self._assigned: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        """Start the session.

        Raises:
            CapacityExhausted: there was no capacity during all retries.
            Unauthorized: the admin key is wrong.
        """
        await self._start(self._base_url.rstrip("/").removesuffix("/v1"), self._admin_key, is_patient=False)
        return self

    @property
    def role_keys(self) -> Mapping[str, str]:
        """The completion keys of ``roles``: a request with one has that role."""
        return dict(self._started.get("role_keys", {}))

    @property
    def session_url(self) -> str:
        """An alias of ``base_url``."""
        return self.base_url

    async def _reward(self, which: Mapping[str, str], reward: object) -> InteractionId:
        number = _parse_reward(reward)
        interaction = await super()._reward(which, number)
        self._assigned[interaction] = number
        return interaction

    async def end_session(self, final_reward: object = None) -> int:
        """End the session and return the number of its interactions. Ending it twice has no effect.

        ``final_reward``, if given, rewards the last completed interaction.
        """
        return await self._end({} if final_reward is None else {"final_reward": _parse_reward(final_reward)})

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
        return parse_episode(await self._post("export_trajectories", arguments, key=self._admin_key))
