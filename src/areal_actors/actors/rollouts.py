"""The rollout runner: runs agents on problems, in groups, each episode in a scope of its own.

An episode opens a session, lets the agent talk to the proxy over HTTP as any agent would, assigns the reward that it
returned, ends the session and collects its rows. A failed episode is data: it is recorded and rejected, and its
siblings live on. A group is delivered when all of its episodes are over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import httpx
from attrs import evolve, field, frozen
from attrs.validators import ge, gt

from areal_actors.actors.positions import positions_from
from areal_actors.core import Actor, Context, Ref
from areal_actors.domain import Credential, DataPosition, Episode, Group, GroupId, Problem, SampleKey, SessionId
from areal_actors.errors import ActorError, ArealError, EpisodeError, RewardError
from areal_actors.messages import (
    AcquirePermit,
    Capacity,
    CollectSession,
    DeliverGroup,
    Endpoint,
    EndSession,
    EpisodeFinished,
    Evaluate,
    Exports,
    ExportSession,
    ForgetSession,
    OpenSession,
    Permit,
    Progress,
    Rollouts,
    RunProblem,
    SessionArchived,
    SessionOpened,
    Sessions,
    SetReward,
    SettlePermit,
)
from areal_actors.telemetry import get_logger
from areal_actors.workflows import Agent, EpisodeContext, Injected, Reward, name_of, run_agent, seat_of
from areal_actors.workflows import context as workflow_context

__all__ = ["Peers", "RolloutRunner", "RolloutsConfig"]

_log = get_logger(__name__)

_FORGET_SECONDS = 5.0


@frozen(kw_only=True)
class RolloutsConfig:
    """How episodes are run."""

    group_size: int = field(default=8, validator=ge(1))
    episode_timeout_seconds: float = field(default=1800.0, validator=gt(0))
    is_archiving: bool = True
    """Whether the trees of finished sessions are sent to the reporter, for dumps and the run report."""
    max_failed_groups: int = field(default=16, validator=ge(1))
    """So many training groups in a row of which every episode failed end the run: it would learn nothing, for ever."""


@frozen(kw_only=True)
class Peers:
    """Whom the runner talks to."""

    sessions: Ref[Sessions]
    exports: Ref[Exports]
    capacity: Ref[Capacity]
    progress: Ref[Progress] | None = None


@frozen(kw_only=True)
class _Slot:
    """One episode to run: which problem, which member of which group, for what."""

    problem: Problem
    group: GroupId
    member: int
    key: SampleKey
    is_eval: bool
    version: int | None
    """That of the newest weights when it began; ``None`` for what is run by hand, which nobody is told of."""

    @property
    def is_training(self) -> bool:
        """Whether the exporter will need its session until the group is trained."""
        return self.version is not None and not self.is_eval


class RolloutRunner(Actor[Rollouts]):
    """Runs training groups as capacity allows, and evaluations when asked.

    ``problem_at`` maps a position to its problem; with ``None`` nothing is produced, only ``RunProblem`` and
    ``Evaluate`` are served.
    """

    def __init__(
        self,
        *,
        agent: Agent,
        peers: Peers,
        endpoint: Endpoint,
        http_client: httpx.AsyncClient,
        config: RolloutsConfig | None = None,
        problem_at: Callable[[int], Problem] | None = None,
        held_out: tuple[Problem, ...] = (),
        start: DataPosition | None = None,
        seed: int = 0,
    ) -> None:
        self._agent = agent
        self._peers = peers
        self._endpoint = endpoint
        self._http_client = http_client
        self._config = config or RolloutsConfig()
        self._problem_at = problem_at
        self._held_out = held_out
        self._start = start or DataPosition()
        self._seed = seed
        self._num_by_hand = 0
        self._num_failed_groups = 0

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Produce training groups while the actor lives."""
        if self._problem_at is not None:
            context.tasks.start_soon(self._produce, self._problem_at)
        yield

    # ---------------------------------------------------------------------------------------------- groups

    async def _produce(self, problem_at: Callable[[int], Problem]) -> None:
        async with anyio.create_task_group() as groups:
            for position in positions_from(self._start):
                permit = await self._peers.capacity.ask(AcquirePermit(holder=f"problem {position}"))
                groups.start_soon(self._produce_group, problem_at(position), permit)

    async def _produce_group(self, problem: Problem, permit: Permit) -> None:
        slots = self._slots(problem, self._config.group_size, purpose="train", version=permit.version)
        group = await self._run_group(problem, slots)
        is_accepted = await self._peers.exports.ask(DeliverGroup(group=group))
        await self._peers.capacity.tell(SettlePermit(permit=permit.id, is_accepted=is_accepted))
        self._check_progress(group)

    def _check_progress(self, group: Group) -> None:
        """Raise if the agent fails and fails: its groups are refunded, and more would be started without end."""
        failures = [episode.failure for episode in group.episodes if episode.failure is not None]
        has_success = len(failures) < len(group.episodes)
        self._num_failed_groups = 0 if has_success else self._num_failed_groups + 1
        if self._num_failed_groups == self._config.max_failed_groups:
            raise EpisodeError(
                f"Every episode of the last {self._num_failed_groups} groups failed, so nothing can be learnt. "
                f"The last failure: {failures[-1]}"
            )

    @Evaluate.handler(concurrency=2)
    async def evaluate(self, message: Evaluate) -> tuple[Group, ...]:
        """One episode per held-out problem, all at once. Their sessions are forgotten: the rows are in the reply."""
        groups: dict[int, Group] = {}

        async def run(problem: Problem) -> None:
            slots = self._slots(problem, 1, purpose="eval", version=message.version)
            groups[problem.position] = await self._run_group(problem, slots)

        async with anyio.create_task_group() as tasks:
            for problem in self._held_out:
                tasks.start_soon(run, problem)
        return tuple(groups[problem.position] for problem in self._held_out)

    @RunProblem.handler(concurrency=256)
    async def run_problem(self, message: RunProblem) -> Group:
        """One group by hand. Its sessions are forgotten: the rows are in the reply."""
        self._num_by_hand += 1
        purpose = f"hand-{self._num_by_hand}"
        slots = self._slots(message.problem, message.num_episodes, purpose=purpose, version=None)
        return await self._run_group(message.problem, slots)

    def _slots(self, problem: Problem, num: int, *, purpose: str, version: int | None) -> list[_Slot]:
        is_eval = purpose == "eval"
        # An evaluation repeats its random numbers at every version, so that only the weights make the difference.
        name = f"eval-{version}-{problem.position}" if is_eval else f"{purpose}-{problem.position}"
        return [
            _Slot(
                problem=problem,
                group=GroupId(name),
                member=member,
                key=SampleKey(seed=self._seed, path=(purpose, problem.position, member)),
                is_eval=is_eval,
                version=version,
            )
            for member in range(num)
        ]

    async def _run_group(self, problem: Problem, slots: list[_Slot]) -> Group:
        episodes: dict[int, Episode] = {}

        async def run(slot: _Slot) -> None:
            episodes[slot.member] = await self._run_episode(slot)

        async with anyio.create_task_group() as members:
            for slot in slots:
                members.start_soon(run, slot)
        return Group(id=slots[0].group, problem=problem, episodes=tuple(episodes[slot.member] for slot in slots))

    # -------------------------------------------------------------------------------------------- episodes

    async def _run_episode(self, slot: _Slot) -> Episode:
        started = anyio.current_time()
        opened = await self._peers.sessions.ask(
            OpenSession(task=f"{slot.group}-{slot.member}", group=slot.group, key=slot.key)
        )
        is_wanted = False
        try:
            episode = await self._settle(slot, opened)
            episode = evolve(episode, seconds=anyio.current_time() - started)
            await self._report(slot, episode)
            is_wanted = slot.is_training
        finally:
            if not is_wanted:
                await self._forget(opened.session)
        return episode

    async def _forget(self, session: SessionId) -> None:
        """Free the session of an episode that was cut short, or whose rows are in the reply of whoever asked."""
        with anyio.move_on_after(_FORGET_SECONDS, shield=True), suppress(ActorError):
            await self._peers.sessions.tell(ForgetSession(session=session))

    async def _settle(self, slot: _Slot, opened: SessionOpened) -> Episode:
        """The episode, succeeded or failed; its session has ended."""
        try:
            return await self._attempt(slot, opened)
        except EpisodeError as error:
            return await self._failed(slot, opened.session, str(error))

    async def _attempt(self, slot: _Slot, opened: SessionOpened) -> Episode:
        reward = await self._run_agent(slot, opened)
        try:
            episode = await self._conclude(slot, opened.session, reward)
        except ActorError:
            raise
        except ArealError as error:
            raise EpisodeError(f"{self._agent_name}.run returned a reward that cannot be kept: {error}") from error
        if episode.num_turns == 0:
            raise EpisodeError(
                f"{self._agent_name}.run never called the model; use the base_url and api_key that it is given."
            )
        return episode

    async def _conclude(self, slot: _Slot, session: SessionId, reward: Reward) -> Episode:
        """Assign the rewards, end the session and build its rows."""
        credential = Credential(session=session)
        if reward.last is not None:
            await self._peers.sessions.ask(SetReward(credential=credential, reward=reward.last))
        for interaction, value in reward.by_interaction.items():
            await self._peers.sessions.ask(SetReward(credential=credential, reward=value, interaction=interaction))
        await self._peers.sessions.ask(EndSession(credential=credential))
        if reward == Reward():
            await self._check_rewarded(session)
        return await self._peers.exports.ask(ExportSession(session=session, member=slot.member))

    async def _check_rewarded(self, session: SessionId) -> None:
        """Raise unless a reward was set over HTTP, by an agent that returned none."""
        record = await self._peers.sessions.ask(CollectSession(session=session))
        if record.interactions and all(turn.reward is None for turn in record.interactions):
            raise RewardError("it is empty, and none was set over HTTP")

    async def _run_agent(self, slot: _Slot, opened: SessionOpened) -> Reward:
        injected = Injected(
            base_url=self._endpoint.session_base_url(opened.session),
            api_key=opened.api_key,
            http_client=self._http_client,
        )
        context = EpisodeContext(task_id=str(slot.problem.position), member=slot.member, is_eval=slot.is_eval)
        seconds = self._config.episode_timeout_seconds
        async with seat_of(self._agent) as agent:  # the wait for one is none of the agent's own time
            with workflow_context.enter(context), anyio.move_on_after(seconds):
                return await run_agent(agent, dict(slot.problem.data), injected)
        raise EpisodeError(
            f"{self._agent_name}.run took longer than {seconds:g} s; "
            "raise rollout.episode_timeout_seconds if episodes need more."
        )

    @property
    def _agent_name(self) -> str:
        return name_of(self._agent)

    async def _failed(self, slot: _Slot, session: SessionId, failure: str) -> Episode:
        """A rejected episode: its session ends, its turns are listed, none is trained."""
        _log.warning("episode_failed", session=session, reason=failure)
        closed = await self._peers.sessions.ask(EndSession(credential=Credential(session=session)))
        return Episode(session=session, member=slot.member, num_turns=closed.num_interactions, failure=failure)

    async def _report(self, slot: _Slot, episode: Episode) -> None:
        progress = self._peers.progress
        if progress is None or slot.version is None:
            return
        finished = EpisodeFinished(episode=episode, problem=slot.problem, version=slot.version, is_eval=slot.is_eval)
        await progress.tell(finished)
        if self._config.is_archiving:
            record = await self._peers.sessions.ask(CollectSession(session=episode.session))
            await progress.tell(
                SessionArchived(record=record, episode=episode, problem=slot.problem, is_eval=slot.is_eval)
            )
