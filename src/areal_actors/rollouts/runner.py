"""The rollout runner: runs agents on problems, in groups, each episode in a separate scope.

An episode opens a session, lets the agent talk to the proxy over HTTP like any other agent, assigns the reward that the
agent returned, ends the session and collects its rows. A failed episode is data: it is recorded and rejected, and its
siblings continue. A group is delivered when all of its episodes are over.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import anyio
import httpx
from attrs import define, evolve, field, frozen
from attrs.validators import ge, gt, le, optional

from areal_actors.cache.roles import ROLE_PATTERN
from areal_actors.datasets import Problems
from areal_actors.domain import (
    Credential,
    Episode,
    EpisodeLimits,
    Group,
    GroupId,
    Problem,
    SampleKey,
    SessionId,
    UntrainedReason,
)
from areal_actors.errors import ActorError, ArealError, ConfigError, CustomFunctionError, EpisodeError, RewardError
from areal_actors.kernel import Actor, Context, Ref
from areal_actors.lib.backoff import Backoff
from areal_actors.lib.settings import COMMON, constant
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AcquirePermit,
    BeginGroup,
    Capacity,
    CollectSession,
    CountLostProxies,
    DeliverGroup,
    Directory,
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
    StoreEpisodes,
)
from areal_actors.training.phases import GroupTeacher
from areal_actors.workflows import (
    Agent,
    EpisodeContext,
    EpisodeEngine,
    GroupedRolloutWorkflow,
    Injected,
    Reward,
    RolloutResult,
    RolloutWorkflow,
    acquire_agent,
    name_of,
    parse_rollout,
    run_agent,
    workflow_context,
)
from areal_actors.workflows.agents import proxy_variables, run_isolated

_log = get_logger(__name__)

_FORGET_SECONDS = 5.0

Agents = Mapping[str, Agent | RolloutWorkflow]
"""Agents by the name of the source whose problems they run; that of all other problems has the empty name."""


def _check_roles(_: object, __: object, roles: tuple[str, ...]) -> None:
    if not roles:
        raise ValueError("names no role, so nothing would be trained; leave it out to train all")
    wrong = [role for role in roles if not re.fullmatch(ROLE_PATTERN, role)]
    if wrong:
        raise ValueError(f"has the role {wrong[0]!r}; use letters, digits, '.', '_' and '-', a letter or digit first")


@frozen(kw_only=True)
class RolloutsConfig:
    """Settings of episodes."""

    group_size: int = field(default=8, validator=[ge(1), le(65_536)], metadata=COMMON)
    """Episodes per problem."""
    train_roles: tuple[str, ...] | None = field(default=None, validator=optional(_check_roles))
    """Roles whose turns are trained; tokens of others are only context. A call has the role agent unless its key, its
    URL or x-areal-agent names another. null trains all roles."""
    episode_timeout_seconds: float = field(default=1800.0, validator=gt(0))
    max_tokens: int | None = field(default=None, validator=optional(ge(1)))
    """The most tokens of an answer, also where a request asks for more. The answer is cut, as at its own limit. A model
    at a URL, which eval asks, has no such limit."""
    limits: EpisodeLimits = field(factory=EpisodeLimits)
    agents_may_reward: bool = constant(False)
    """Whether agents get their session's full-access key instead of the completion key, and so may set rewards."""
    is_trial: bool = constant(False)
    """Whether episodes of evaluations are sampled as those of training are."""
    is_archiving: bool = constant(True)
    """Whether the trees of finished sessions are sent to the reporter, for dumps and the run report."""
    max_unreachable_seconds: float = constant(300.0)
    """How long the proxy may be unreachable before the run ends; meanwhile no episode counts as failed."""
    max_concurrent_evaluations: int = constant(128)
    """Episodes of evaluations that run at the same time."""
    max_failed_groups: int = constant(16)
    """The run ends after this many training groups in a row in which every episode failed: it cannot learn."""


@frozen(kw_only=True)
class Peers:
    """The actors that the runner sends messages to."""

    sessions: Ref[Sessions]
    exports: Ref[Exports]
    capacity: Ref[Capacity] | None = None
    """Only needed to produce training groups."""
    progress: Ref[Progress] | None = None
    directory: Ref[Directory] | None = None
    """Knows the proxies in other processes; ``None`` without any."""


@frozen(kw_only=True)
class _Member:
    """An episode to run: its problem, its member of a group, and its purpose."""

    problem: Problem
    group: GroupId
    index: int
    key: SampleKey
    is_eval: bool
    version: int | None
    """Version of the newest weights when it began; ``None`` for a manual run, which is not reported."""
    num_members: int
    """The number of members of its group, including those that are not run again."""

    @property
    def is_training(self) -> bool:
        """Whether the exporter needs its session until the group is trained."""
        return self.version is not None and not self.is_eval

    @property
    def context(self) -> EpisodeContext:
        """The context that code inside the episode may query."""
        return EpisodeContext(task_id=self.problem.task, member=self.index, is_eval=self.is_eval)


@frozen(kw_only=True)
class RolloutSource:
    """The agent that runs the problems of one source, and its settings."""

    agent: Agent | RolloutWorkflow
    config: RolloutsConfig

    @classmethod
    def of(cls, agent: Agent | RolloutWorkflow, config: RolloutsConfig) -> RolloutSource:
        """Return the source of an agent; a grouped workflow brings the size of its groups."""
        if isinstance(agent, GroupedRolloutWorkflow):
            return cls(agent=agent.workflow, config=evolve(config, group_size=agent.group_size))
        return cls(agent=agent, config=config)


class RolloutRunner(Actor[Rollouts]):
    """Runs training groups as capacity allows, and evaluations on request.

    Each of ``agents``, with the settings of the same name in ``configs``, runs the problems of its source; problems of
    other sources are run by the one with the empty name, or else by the first. ``train`` are the problems to train on
    by source; without them, no training groups are run, and only ``RunProblem`` and ``Evaluate`` are served. A rollout
    workflow needs the ``engine`` that its episodes sample from; the group of a grouped workflow is run member by
    member. A ``teacher`` scores groups before they are delivered; they are trained at most ``max_staleness`` versions
    later.
    """

    def __init__(
        self,
        agents: Agents,
        *,
        peers: Peers,
        endpoint: Endpoint,
        http_client: httpx.AsyncClient,
        configs: Mapping[str, RolloutsConfig],
        engine: EpisodeEngine | None = None,
        train: Mapping[str, Problems] | None = None,
        held_out: Mapping[str, Problems] = MappingProxyType({}),
        seed: int = 0,
        teacher: GroupTeacher | None = None,
        max_staleness: int = 0,
    ) -> None:
        found = {name: RolloutSource.of(agent, configs[name]) for name, agent in agents.items()}
        default = "" if "" in agents else next(iter(agents))
        self._default = found[default]
        self._sources = {name: source for name, source in found.items() if name}
        for source in found.values():
            if isinstance(source.agent, RolloutWorkflow) and engine is None:
                raise ConfigError(
                    f"{type(source.agent).__name__} is a rollout workflow, and there is no engine for its episodes."
                )
        self._engine = engine
        self._peers = peers
        self._endpoint = endpoint
        self._http_client = http_client
        self._proxy = ProxyProbe(endpoint, http_client)
        self._config = configs[default]
        self._train = train
        self._held_out = [
            evolve(problem, source=name) for name, problems in held_out.items() for problem in problems.all()
        ]
        self._seed = seed
        self._teacher = teacher
        self._max_staleness = max_staleness
        self._num_by_hand = 0
        self._num_failed_groups: Counter[str] = Counter()
        """Groups in a row in which every episode failed, by source."""

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Produce training groups while the actor runs."""
        if self._train is not None:
            context.tasks.start_soon(self._produce, self._train)
        yield

    # ---------------------------------------------------------------------------------------------- groups

    @property
    def _capacity(self) -> Ref[Capacity]:
        assert self._peers.capacity is not None, "training groups need capacity"
        return self._peers.capacity

    async def _produce(self, problems: Mapping[str, Problems]) -> None:
        sizes = {name: len(found) for name, found in problems.items()}
        async with anyio.create_task_group() as groups:
            while True:
                permit = await self._capacity.ask(AcquirePermit(holder="rollouts"))
                wanted = BeginGroup(version=permit.version, num_problems=sizes)
                draw = await self._peers.exports.ask(wanted)
                problem = evolve(problems[draw.source].at(draw.position, draw.row), source=draw.source)
                groups.start_soon(self._produce_group, problem, permit, draw.finished)

    async def _produce_group(self, problem: Problem, permit: Permit, finished: tuple[Episode, ...]) -> None:
        config = self._source(problem).config
        members = self._create_members(problem, config.group_size, purpose="train", version=permit.version)
        group = await self._run_group(problem, members, finished=finished)
        if self._teacher is not None:
            group = await self._teacher.teach(group, version=permit.version, max_staleness=self._max_staleness)
        is_accepted = await self._peers.exports.ask(DeliverGroup(group=group))
        await self._capacity.tell(SettlePermit(permit=permit.id, is_accepted=is_accepted))
        # Failed groups are refunded, so without this check more would be started without end.
        failures = [e.failure for e in group.episodes if e.failure is not None and not e.is_rejected]
        if any(episode.num_empty_turns for episode in group.episodes):
            # This is not the agent's fault; the trainer's gate reports it.
            return
        has_success = len(failures) < len(group.episodes)
        num_failed = 0 if has_success else self._num_failed_groups[problem.source] + 1
        self._num_failed_groups[problem.source] = num_failed
        if num_failed == self._config.max_failed_groups:
            of_source = f" of source {problem.source}" if problem.source else ""
            raise EpisodeError(
                f"Every episode of the last {num_failed} groups{of_source} failed, so nothing can be learnt. "
                f"The last failure: {failures[-1]}"
            )

    def _source(self, problem: Problem) -> RolloutSource:
        return self._sources.get(problem.source, self._default)

    def _settings_of(self, problem: Problem) -> str:
        return f"sources.{problem.source}" if problem.source in self._sources else "rollout"

    async def _find_limit(self, session: SessionId) -> str | None:
        """Return the limit that refused a request of the session."""
        return (await self._peers.sessions.ask(CollectSession(session=session))).limit

    @Evaluate.handler(concurrency=2)
    async def evaluate(self, message: Evaluate) -> tuple[Group, ...]:
        """Run the episodes, as many at a time as the settings allow.

        Their sessions are forgotten, as the reply holds the rows.
        """
        groups: dict[str, Group] = {}
        finished = frozenset(message.finished)
        limiter = anyio.CapacityLimiter(self._config.max_concurrent_evaluations)

        async def run(problem: Problem, members: list[_Member]) -> None:
            groups[problem.task] = await self._run_group(problem, members, limiter=limiter)

        async with anyio.create_task_group() as tasks:
            for problem in self._held_out:
                num = message.num_by_source.get(problem.source, message.num_samples)
                created = self._create_members(problem, num, purpose="eval", version=message.version)
                members = [member for member in created if (problem.task, member.index) not in finished]
                if members:
                    tasks.start_soon(run, problem, members)
        return tuple(groups[problem.task] for problem in self._held_out if problem.task in groups)

    @RunProblem.handler(concurrency=256)
    async def run_problem(self, message: RunProblem) -> Group:
        """Run one group manually. Its sessions are forgotten, because the rows are in the reply."""
        self._num_by_hand += 1
        # Part of the sample keys, so that repeated manual runs do not repeat their random numbers.
        purpose = f"hand-{self._num_by_hand}"
        members = self._create_members(message.problem, message.num_episodes, purpose=purpose, version=None)
        return await self._run_group(message.problem, members)

    def _create_members(self, problem: Problem, num: int, *, purpose: str, version: int | None) -> list[_Member]:
        is_eval = purpose == "eval"
        # Evaluations use the same random numbers at every version, so that only the weights make a difference.
        name = f"eval-{version}-{problem.task}" if is_eval else f"{purpose}-{problem.task}"
        # Within its set, so that another set in the configuration does not change the samples of this one. The only
        # source of a run needs no name, and its episodes are those of the same dataset without a source.
        is_named = bool(problem.source) and (is_eval or len(self._sources) > 1)
        place = problem.place if is_named else (problem.position,)
        return [
            _Member(
                problem=problem,
                group=GroupId(name),
                index=index,
                key=SampleKey(seed=self._seed, path=(purpose, *place, index)),
                is_eval=is_eval,
                version=version,
                num_members=num,
            )
            for index in range(num)
        ]

    async def _run_group(
        self,
        problem: Problem,
        members: list[_Member],
        *,
        limiter: anyio.CapacityLimiter | None = None,
        finished: tuple[Episode, ...] = (),
    ) -> Group:
        # A workflow may make several episodes of a member, with numbers that are a multiple of the group's size apart.
        episodes: dict[int, tuple[Episode, ...]] = {}
        for episode in finished:
            index = episode.member % len(members)
            episodes[index] = (*episodes.get(index, ()), episode)

        async def run(member: _Member) -> None:
            # Acquired for the member: tasks of the agent that it starts do not count.
            async with limiter or nullcontext():
                await run_member(member)
            # The last one is stored with the whole group.
            if member.is_training and len(episodes) < len(members):
                part = Group(id=member.group, problem=problem, episodes=episodes[member.index])
                await self._peers.exports.tell(StoreEpisodes(group=part, member=member.index))

        async def run_member(member: _Member) -> None:
            agent = self._source(member.problem).agent
            if isinstance(agent, RolloutWorkflow):
                episodes[member.index] = await self._run_workflow(agent, member)
                return
            episode = await self._run_once(agent, member)
            # An episode that failed because the proxy was unreachable is run again.
            while episode is None:
                await self._proxy.wait_reachable(max_seconds=self._config.max_unreachable_seconds)
                episode = await self._run_once(agent, member)
            episodes[member.index] = (episode,)

        async with anyio.create_task_group() as tasks:
            for member in members:
                if member.index not in episodes:
                    tasks.start_soon(run, member)
        whole = tuple(episode for member in members for episode in episodes[member.index])
        return Group(id=members[0].group, problem=problem, episodes=whole)

    # -------------------------------------------------------------------------------------------- episodes

    async def _run_workflow(self, workflow: RolloutWorkflow, member: _Member) -> tuple[Episode, ...]:
        """Return one episode for each sample that the workflow returned, or one that says why there is none.

        In a group of n, the samples of member m are the members m, m + n, m + 2 n and so on.
        """
        assert self._engine is not None
        started = anyio.current_time()
        config = self._source(member.problem).config
        engine = self._engine.for_episode(key=member.key, max_tokens=config.max_tokens, limits=config.limits)
        # In place of a session's id; rows and the report tell episodes apart by it.
        session = SessionId(f"{member.group}-{member.index}")
        with workflow_context.enter(member.context):
            try:
                first, *others = await self._sample(workflow, engine, member, session)
            except EpisodeError as error:
                failure, limit = str(error), engine.budget.reached
                if limit is not None:
                    number = getattr(config.limits, limit)
                    where = f"{self._settings_of(member.problem)}.limits.{limit} ({number})"
                    failure = f"{failure}\nThe episode had reached {where}."
                _log.debug("episode_failed", session=session, reason=failure)
                traceback = error.traceback or None
                first, others = Episode(session=session, member=member.index, failure=failure, traceback=traceback), []
            # Only the first of several samples carries the logged numbers, so that they count once.
            first = evolve(first, logged=workflow_context.logged(), limit=engine.budget.reached)
        seconds = anyio.current_time() - started
        episodes = tuple(evolve(episode, seconds=seconds) for episode in (first, *others))
        for episode in episodes:
            await self._tell_finished(member, episode)
        return episodes

    async def _sample(
        self, workflow: RolloutWorkflow, engine: EpisodeEngine, member: _Member, session: SessionId
    ) -> tuple[Episode, ...]:
        """Run the workflow. Raises ``EpisodeError`` if it raised, took too long, or returned nothing to train."""
        name = f"{type(workflow).__name__}.arun_episode"
        seconds = self._source(member.problem).config.episode_timeout_seconds
        result: RolloutResult = None
        with anyio.move_on_after(seconds) as scope:
            call = partial(workflow.arun_episode, engine, dict(member.problem.data))
            result = await run_isolated(call, name=name)
        if scope.cancelled_caught:
            setting = f"{self._settings_of(member.problem)}.episode_timeout_seconds"
            raise EpisodeError(f"{name} took longer than {seconds:g} s; raise {setting} if episodes need more.")
        if result is None:
            _log.info("episode_rejected", session=session)
            failure = f"{name} returned None: the episode is rejected."
            return (Episode(session=session, member=member.index, failure=failure, is_rejected=True),)
        samples = parse_rollout(
            result,
            session=session,
            name=name,
            version=engine.oldest_version,
            sampling_of=engine.sampling_of,
            vocab_size=(await engine.describe()).vocab_size,
        )
        rows = [row for sample in samples for row in sample.trajectories]
        if member.is_training and not any(row.num_trained_tokens for row in rows):
            raise EpisodeError(
                f"{name} returned rows in which nothing is to be trained; mark what was sampled in loss_mask, or "
                "return None to reject the episode."
            )
        return tuple(
            Episode(
                session=sample.trajectories[0].session,
                member=member.index + index * member.num_members,
                reward=sample.reward,
                trajectories=sample.trajectories,
                num_turns=sample.num_turns,
            )
            for index, sample in enumerate(samples)
        )

    async def _run_once(self, agent: Agent, member: _Member) -> Episode | None:
        """Return the episode, or ``None`` if it failed because a proxy was lost, which no agent can fix."""
        started, num_lost = anyio.current_time(), await self._count_lost_proxies()
        config = self._source(member.problem).config
        opened = await self._peers.sessions.ask(
            OpenSession(
                task=f"{member.group}-{member.index}",
                group=member.group,
                key=member.key,
                max_tokens=config.max_tokens,
                limits=config.limits,
                limited_roles=config.train_roles,
                is_trained=not member.is_eval or config.is_trial,
            )
        )
        is_wanted = False
        try:
            with workflow_context.enter(member.context, find_limit=partial(self._find_limit, opened.session)):
                try:
                    episode = await self._attempt(agent, member, opened)
                except EpisodeError as error:
                    episode = await self._fail(member, opened.session, error)
                logged = {**episode.logged, **workflow_context.logged()}
            has_ended_early = episode.failure is not None or episode.cut_short is not None
            if has_ended_early and await self._was_cut_off(episode, num_lost):
                return None
            episode = evolve(episode, seconds=anyio.current_time() - started, logged=logged)
            await self._tell_finished(member, episode)
            progress = self._peers.progress
            if progress is not None and member.version is not None and self._config.is_archiving:
                record = await self._peers.sessions.ask(CollectSession(session=episode.session))
                await progress.tell(
                    SessionArchived(record=record, episode=episode, problem=member.problem, is_eval=member.is_eval)
                )
            is_wanted = member.is_training
        finally:
            # The episode was interrupted, or its rows are in the reply: nothing else needs the session.
            if not is_wanted:
                with anyio.move_on_after(_FORGET_SECONDS, shield=True), suppress(ActorError):
                    await self._peers.sessions.tell(ForgetSession(session=opened.session))
        return episode

    async def _was_cut_off(self, episode: Episode, num_lost: int) -> bool:
        """Return whether the proxy does not answer, or one was lost since ``num_lost`` were, during the episode."""
        if not await self._proxy.is_reachable() or await self._count_lost_proxies() != num_lost:
            return True
        if self._peers.directory is None or not _CUT_OFF.search(f"{episode.failure or episode.cut_short}"):
            return False
        # Another proxy answers, and the agent's connection broke before the end of this one was noticed.
        await anyio.sleep(_NOTICE_SECONDS)
        return await self._count_lost_proxies() != num_lost

    async def _count_lost_proxies(self) -> int:
        directory = self._peers.directory
        return 0 if directory is None else await directory.ask(CountLostProxies())

    async def _attempt(self, agent: Agent, member: _Member, opened: SessionOpened) -> Episode:
        injected = Injected(
            base_url=self._endpoint.session_base_url(opened.session),
            api_key=opened.api_key if self._config.agents_may_reward else opened.completion_key,
            http_client=self._http_client,
        )
        seconds, reward = self._source(member.problem).config.episode_timeout_seconds, None
        name = name_of(agent)
        # The wait for a free process is not the agent's time.
        async with acquire_agent(agent) as acquired:
            with anyio.move_on_after(seconds):
                reward = await run_agent(acquired, dict(member.problem.data), injected)
        if reward is None:
            raise EpisodeError(
                f"{name}.run took longer than {seconds:g} s; "
                f"raise {self._settings_of(member.problem)}.episode_timeout_seconds if episodes need more."
            )
        never_called = f"{name}.run never called the model; use the base_url and api_key that it is given."
        try:
            episode = await self._conclude(member, opened.session, reward)
            record = (
                await self._peers.sessions.ask(CollectSession(session=opened.session)) if reward == Reward() else None
            )
            # An agent that returns no reward has to set one over HTTP.
            if record and record.interactions and all(turn.reward is None for turn in record.interactions):
                raise RewardError(
                    "it is empty, and none was set over HTTP"
                    if self._config.agents_may_reward
                    else "it is empty; return a number, or let agents reward themselves "
                    "(rollout.openai.agents_may_reward)"
                )
        # Not the fault of the agent: these end the run.
        except (ActorError, CustomFunctionError):
            raise
        except ArealError as error:
            record = await self._peers.sessions.ask(CollectSession(session=opened.session))
            # A reward has no answer to go to.
            if not record.interactions:
                raise EpisodeError(never_called) from error
            raise EpisodeError(f"{name}.run returned a reward that cannot be kept: {error}") from error
        if episode.num_turns == 0:
            raise EpisodeError(never_called)
        untrained = {entry.reason for entry in episode.untrained}
        if member.is_training and not episode.trajectories and untrained == {UntrainedReason.OTHER_ROLE}:
            wanted = ", ".join(self._config.train_roles or ())
            raise EpisodeError(
                f"No turn of the episode has a role of rollout.train_roles ({wanted}); "
                "a call without attribution has the role agent."
            )
        return episode

    async def _conclude(self, member: _Member, session: SessionId, reward: Reward) -> Episode:
        """Assign the rewards, end the session and build its rows."""
        credential = Credential(session=session, has_control=True)
        if reward.last is not None:
            await self._peers.sessions.ask(SetReward(credential=credential, reward=reward.last, is_outcome=True))
        for interaction, value in reward.by_interaction.items():
            await self._peers.sessions.ask(SetReward(credential=credential, reward=value, interaction=interaction))
        await self._peers.sessions.ask(EndSession(credential=credential))
        return await self._peers.exports.ask(ExportSession(session=session, member=member.index))

    async def _fail(self, member: _Member, session: SessionId, failed: EpisodeError) -> Episode:
        """Return a rejected episode: its session ends and its turns are counted, but none is trained.

        An episode that had reached a limit of ``limits.reward`` is trained with that reward instead.
        """
        failure, traceback = str(failed), failed.traceback or None
        limits = self._source(member.problem).config.limits
        limit = await self._find_limit(session)
        if limit is not None:
            where = f"{self._settings_of(member.problem)}.limits.{limit}"
            failure = f"{failure}\nThe episode had reached {where} ({getattr(limits, limit)})."
            if limits.reward is not None:
                episode = await self._conclude(member, session, Reward(last=limits.reward))
                return evolve(episode, cut_short=failure, traceback=traceback)
        # The display shows each kind of failure once; here it would be one line for each of hundreds of episodes.
        _log.debug("episode_failed", session=session, reason=failure)
        credential = Credential(session=session, has_control=True)
        closed = await self._peers.sessions.ask(EndSession(credential=credential))
        record = await self._peers.sessions.ask(CollectSession(session=session))
        if not closed.num_interactions and _ELSEWHERE.search(failure):
            failure = f"{failure}\n{NEVER_REACHED}"
            if variables := proxy_variables():
                failure += (
                    f" {', '.join(variables)} names another proxy, which cannot reach this one. NO_PROXY tells clients "
                    "so, but this client may not read it."
                )
        return Episode(
            session=session,
            member=member.index,
            num_turns=closed.num_interactions,
            num_empty_turns=record.num_empty_turns,
            logged=record.logged,
            failure=failure,
            traceback=traceback,
            limit=limit,
        )

    async def _tell_finished(self, member: _Member, episode: Episode) -> None:
        progress = self._peers.progress
        if progress is not None and member.version is not None:
            await progress.tell(
                EpisodeFinished(
                    episode=episode,
                    problem=member.problem,
                    version=member.version,
                    is_eval=member.is_eval,
                )
            )


_CUT_OFF = re.compile(r"connect|disconnect|protocolerror|readerror|writeerror|reset|broken", re.IGNORECASE)
"""Words in the errors of HTTP clients whose connection broke."""
_ELSEWHERE = re.compile(
    r"connect|refused|getaddrinfo|name resolution|unauthori[sz]ed|\b40[134]\b|api.?key", re.IGNORECASE
)
"""Words in the errors of a client that asks another server, or has another key."""
NEVER_REACHED = (
    "The agent never reached the proxy with the key of its episode: use the base_url and api_key that run receives (or "
    "OPENAI_BASE_URL and OPENAI_API_KEY, which commands and child processes have), not an address of its own."
)
"""The hint that is added to the failure of such an episode."""
_NOTICE_SECONDS = 1.0
"""Time within which the end of a process on this machine is noticed: some milliseconds, unless the machine is busy."""
_ANSWER_SECONDS = 10.0
"""Time limit of one probe.

A proxy under full load answers its health route within it; connecting to a lost node would take forever.
"""
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 5.0


@define
class ProxyProbe:
    """Checks the health route of the proxy at ``endpoint``, with the HTTP client that agents use."""

    endpoint: Endpoint
    http_client: Any  # httpx or httpx2: which one depends on the installed SDKs

    async def is_reachable(self) -> bool:
        """Return whether the proxy answers; any status counts."""
        return await self._find_problem() is None

    async def wait_reachable(self, *, max_seconds: float) -> None:
        """Wait until the proxy answers. Raises ``EpisodeError`` after ``max_seconds``."""
        deadline = anyio.current_time() + max_seconds
        backoff = Backoff(first_seconds=_FIRST_PAUSE_SECONDS, max_seconds=_MAX_PAUSE_SECONDS)
        while (problem := await self._find_problem()) is not None:
            if anyio.current_time() >= deadline:
                raise EpisodeError(
                    f"The proxy at {self.endpoint.url} has not answered for {max_seconds:g} s ({problem}), so no agent "
                    "can reach the model. Check that the machines of rollouts can reach that address (proxy.host, "
                    "proxy.public_host)."
                )
            pause = backoff.next_delay()
            _log.warning("proxy_unreachable", url=self.endpoint.url, reason=problem, again_in_seconds=pause)
            await anyio.sleep(pause)

    async def _find_problem(self) -> str | None:
        problem = f"no answer within {_ANSWER_SECONDS:g} s"
        with anyio.move_on_after(_ANSWER_SECONDS):
            try:
                await self.http_client.get(f"{self.endpoint.url}/health")
            except Exception as error:  # noqa: BLE001 - of httpx or httpx2; whatever it is, the proxy did not answer
                return f"{type(error).__name__}: {error}"
            return None
        return problem
