"""Rollout workflows: episodes whose author controls everything, from the prompt's ids to the tensors that are trained.

Prefer an agent (``agents``), which is simpler: it only talks to a model. A ``RolloutWorkflow`` gets the engine itself
and returns what is to be trained. ``interactions`` converts that to rows; ``rollouts/runner`` runs the episodes.

A configuration or a caller names a workflow or an agent by an instance, a class (with keyword arguments), a dotted name
(``package.module.Class``) or a file and a name (``agents/tool.py:ToolAgent``, relative to the configuration).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import anyio
from attrs import evolve

from areal_actors.cache import pad_together
from areal_actors.cache.interactions import InteractionViews, InteractionWithTokenLogpReward
from areal_actors.client import OpenAIProxyClient, create_agent_http_client
from areal_actors.errors import ActorStopped, ConfigError, EpisodeError, WorkflowError
from areal_actors.kernel import Ref
from areal_actors.lib.references import import_reference
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import Intake, SettleTaken, TakeSession
from areal_actors.workflows import context as workflow_context
from areal_actors.workflows.agents import (
    Agent,
    Injected,
    describe_error,
    direct_connections,
    placeholder_keys,
    run_agent,
)
from areal_actors.workflows.engine import EpisodeEngine
from areal_actors.workflows.interactions import is_interactions

_log = get_logger(__name__)

RolloutResult = Mapping[str, Any] | None
"""Tensors by name, interactions by completion id, or ``None`` to reject the episode."""


class RolloutWorkflow(ABC):
    """One episode on a problem.

    Instances are shared by concurrent episodes, so keep the state of one in local variables.

    A subclass that has ``_run_one_episode(engine, data, rid)`` instead of ``arun_episode`` is accepted, and so is its
    return value ``(completions, comp_data)``, of which the first is used. That form is deprecated.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Use the deprecated method as ``arun_episode`` in a subclass that only has that."""
        super().__init_subclass__(**options)
        if "_run_one_episode" in vars(cls) and "arun_episode" not in vars(cls):

            async def arun_episode(self: Any, engine: EpisodeEngine, data: dict[str, Any]) -> RolloutResult:
                returned = await self._run_one_episode(engine, data, uuid4().hex)
                result: RolloutResult = returned[0] if isinstance(returned, tuple) else returned
                return result

            cls.arun_episode = arun_episode  # type: ignore[method-assign]

    @abstractmethod
    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> RolloutResult:
        """Run one episode; ``engine`` samples for it, ``data`` is its problem.

        Returns tensors (``input_ids`` and ``attention_mask`` [batch, seq] at least), interactions as returned by
        ``ArealOpenAI.export_interactions``, or ``None`` to reject the episode. An exception fails the episode.
        """


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs ``workflow`` ``group_size`` times concurrently on each problem, and joins the results.

    Tensors are joined along the batch and padded; interactions are merged into one dictionary. Rejected members are
    left out, and so are failed ones, which are logged; the result is ``None`` if all were rejected. A training run
    splits the group: there each member is a separate episode.
    """

    def __init__(self, workflow: RolloutWorkflow, group_size: int) -> None:
        if group_size < 1:
            raise ConfigError(f"group_size must be at least 1, not {group_size}.")
        self.workflow = workflow
        self.group_size = group_size

    async def arun_episode(self, engine: EpisodeEngine, data: dict[str, Any]) -> RolloutResult:
        """Run all members. Raises ``EpisodeError`` if all of them fail, or if their results are of two kinds."""
        results: dict[int, RolloutResult] = {}
        failures: list[Exception] = []

        async def run(member: int) -> None:
            try:
                with workflow_context.enter(evolve(workflow_context.get(), member=member)):
                    results[member] = await self.workflow.arun_episode(engine.for_episode(member), dict(data))
            except Exception as error:  # noqa: BLE001 - a failing member must not cancel its siblings
                _log.warning("member_failed", member=member, reason=describe_error(error))
                failures.append(error)

        async with anyio.create_task_group() as members:
            for member in range(self.group_size):
                members.start_soon(run, member)
        if not results:
            raise EpisodeError(f"All {self.group_size} members failed; {describe_error(failures[0])}") from failures[0]
        valid = [result for _, result in sorted(results.items()) if result is not None]
        if not valid:
            return None
        are_interactions = {is_interactions(result) for result in valid}
        if len(are_interactions) > 1:
            raise EpisodeError("Some members of the group returned tensors and others interactions; return one kind.")
        if are_interactions == {True}:
            return {name: interaction for result in valid for name, interaction in result.items()}
        return pad_together(valid)


def resolve_agent(
    workflow: Any,
    *,
    workflow_kwargs: Mapping[str, Any] | None = None,
    directory: Path | None = None,
    may_block: bool = False,
) -> Agent:
    """Return the agent that ``workflow`` refers to. Raises ``WorkflowError`` describing what was found instead.

    A plain ``def run`` is accepted if ``may_block`` is true, which is the case in a separate process.
    """
    return _checked(_build(workflow, workflow_kwargs, directory), workflow, may_block=may_block)


def resolve_workflow(workflow: Any, *, workflow_kwargs: Mapping[str, Any] | None = None) -> Agent | RolloutWorkflow:
    """Return the agent or rollout workflow that ``workflow`` refers to. Raises ``WorkflowError`` if it is neither."""
    target = _build(workflow, workflow_kwargs)
    return target if isinstance(target, RolloutWorkflow) else _checked(target, workflow, may_block=False)


def _build(workflow: Any, workflow_kwargs: Mapping[str, Any] | None, directory: Path | None = None) -> Any:
    """Return the object that ``workflow`` names, is, or constructs."""
    kwargs = dict(workflow_kwargs or {})
    target = import_reference(workflow, directory=directory) if isinstance(workflow, str) else workflow
    if not inspect.isclass(target):
        if kwargs:
            raise WorkflowError(
                f"workflow_kwargs {sorted(kwargs)} were given with {_describe(workflow)}, which is built already; "
                "pass its class, or leave them out."
            )
        return target
    call = f"{target.__name__}({', '.join(sorted(kwargs))})"
    try:
        return target(**kwargs)
    except TypeError as error:
        raise WorkflowError(f"{call} does not fit: {error}") from error
    except Exception as error:
        raise WorkflowError(f"{call} raised {type(error).__name__}: {error}") from error


def _checked(target: Any, workflow: Any, *, may_block: bool) -> Agent:
    run = getattr(target, "run", None)
    if not (inspect.iscoroutinefunction(run) or (may_block and callable(run))):
        found = "no method 'run'" if run is None else "a 'run' that is not 'async def'"
        way_out = "; one that blocks needs rollout.openai.mode: subprocess" if callable(run) else ""
        raise WorkflowError(
            f"{_describe(workflow)} has {found}; an agent has 'async def run(self, data, **extra_kwargs)'{way_out}, "
            "and a rollout workflow is a subclass of RolloutWorkflow."
        )
    agent: Agent = target
    return agent


def _describe(workflow: Any) -> str:
    return repr(workflow) if isinstance(workflow, str) else f"{type(workflow).__name__} {workflow!r}"


_SETTLE_SECONDS = 5.0


class _HasIntake(Protocol):
    """An object that takes in external sessions, such as the result of ``open_inference``."""

    @property
    def intake(self) -> Ref[Intake] | None: ...


class ProxyWorkflow(RolloutWorkflow):
    """Each episode is the next session that an external agent finished and rewarded, in order of completion.

    ::

        config = InferenceConfig(intake=IntakeConfig(is_delivering=False))
        async with open_inference("tiny", config) as inference:
            interactions = await ProxyWorkflow(inference).arun_episode(inference, None)

    Nothing is polled, and no session is delivered twice. A session that was being delivered to an episode that is
    cancelled goes to the next one. Raises ``ConfigError`` if external sessions are not taken in.
    """

    def __init__(self, inference: _HasIntake) -> None:
        if inference.intake is None:
            raise ConfigError(
                "No external sessions are taken in here; open the inference with "
                "InferenceConfig(intake=IntakeConfig(is_delivering=False))."
            )
        self._intake = inference.intake

    async def arun_episode(
        self,
        engine: EpisodeEngine | Any,  # noqa: ARG002 - the session has been sampled already
        data: Mapping[str, Any] | None = None,
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Wait for a session and return its interactions, by the id of their completions, as training rows.

        Raises ``EpisodeError`` for ``data``: external agents choose their own problems.
        """
        if data is not None:
            raise EpisodeError("ProxyWorkflow takes no data: external agents bring their own problems. Pass None.")
        taker = uuid4().hex
        is_kept = False
        try:
            taken = await self._intake.ask(TakeSession(taker=taker))
            interactions = InteractionViews(taken.record).rows(taken.episode.trajectories)
            is_kept = True
        finally:
            # Shielded: if this episode is cancelled, its session has to be released for the next one.
            with anyio.move_on_after(_SETTLE_SECONDS, shield=True), suppress(ActorStopped):
                await self._intake.tell(SettleTaken(taker=taker, is_kept=is_kept))
        return interactions


class OpenAIProxyWorkflow(RolloutWorkflow):
    """Runs ``agent`` in this event loop, with a separate session for each episode.

    ::

        workflow = OpenAIProxyWorkflow(agent=MyAgent(), proxy_addr=url, admin_key=key, discount=0.9)
        interactions = await workflow.arun_episode(None, data)
    """

    def __init__(
        self,
        agent: Any,
        proxy_addr: str,
        *,
        admin_key: str,
        discount: float | None = None,
        export_style: str | None = None,
        agents_may_reward: bool = False,
    ) -> None:
        """Configure the episodes; nothing is sent yet.

        Args:
            agent: an instance, a class, or its dotted name.
            proxy_addr: the proxy's URL, with or without ``/v1``.
            admin_key: authorises the routes that start and export sessions; a user's key does so, too.
            discount: how rewards are propagated to earlier turns; ``None`` uses the proxy's setting.
            export_style: ``individual``, ``concat`` or ``tree``; ``None`` uses the proxy's setting.
            agents_may_reward: whether the agent may also reward its session over HTTP. It gets the session's key then;
                otherwise a key that only authorises completions.

        Raises:
            WorkflowError: there is no such agent.
        """
        self.agent = resolve_agent(agent)
        self._address = proxy_addr
        self._admin_key = admin_key
        self._discount = discount
        self._style = export_style
        self._agents_may_reward = agents_may_reward

    async def arun_episode(
        self,
        engine: Any,  # noqa: ARG002 - the proxy has an engine
        data: dict[str, Any],
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Run one episode; return its training rows, each by the completion that it ends, without messages.

        Raises:
            EpisodeError: the agent raised, or returned something that is not a reward. Its session is ended in any
                case.
            InvalidRequest: a reward is not finite, or there is no completion that it could apply to.
            NotFound: the agent rewarded a completion that its session does not have.
        """
        current = workflow_context.get()
        task = f"task-{current.task_id or 0}-{current.member}"
        client = OpenAIProxyClient(self._address, admin_key=self._admin_key, task_id=task)
        async with create_agent_http_client() as http_client, client as session:
            key = session.api_key if self._agents_may_reward else session.completion_key
            injected = Injected(base_url=session.base_url, api_key=key, http_client=http_client)
            with placeholder_keys(), direct_connections(session.base_url):
                reward = await run_agent(self.agent, data, injected)
            for interaction, value in reward.by_interaction.items():
                await session.set_reward(interaction, value)
            if reward.last is not None:
                await session.set_last_reward(reward.last)
                # Marks the number as the reward of the whole episode.
                await session.end_session(reward.last)
        return await session.export_interactions(discount=self._discount, style=self._style)
