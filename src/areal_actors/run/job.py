"""Load what the roles of a run need: model and policy, problems, conversations, agents, and teacher."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from areal_actors.config import AgentMode, RolloutConfig, RunConfig
from areal_actors.dashboard import RunDirectory
from areal_actors.datasets import (
    DatasetConfig,
    Problems,
    find_overlap,
    find_shortage,
    load_problems,
)
from areal_actors.domain import ChatMessage, as_ints
from areal_actors.errors import (
    ConfigError,
    DatasetError,
    SandboxError,
    WorkflowError,
)
from areal_actors.generation.servers.config import Backend
from areal_actors.generation.servers.teacher import Probe, open_teacher
from areal_actors.lib.plugins import PluginGroup, plugin_names
from areal_actors.lib.references import import_reference
from areal_actors.lib.telemetry import get_logger
from areal_actors.models import ModelFiles, create_empty_policy, load_policy, model_shape, resolve_model
from areal_actors.rendering import Renderer, load_renderer
from areal_actors.rollouts.runner import Agents
from areal_actors.run.conversations import SupervisedData, load_conversations, load_rollouts
from areal_actors.sandbox import create_sandbox
from areal_actors.training.phases import GroupTeacher, PhaseName
from areal_actors.workflows import (
    Agent,
    AgentPool,
    CommandAgent,
    CommandConfig,
    PluginWorkflow,
    PoolConfig,
    RolloutWorkflow,
    direct_connections,
    find_environment,
    placeholder_keys,
    resolve_workflow,
    serialize_agent,
)

if TYPE_CHECKING:
    from areal_actors.training.config import TrainerConfig
    from areal_actors.training.trainer import PolicyTrainer

_log = get_logger(__name__)


_PLAIN_TEXT = "The answer is 42: two plus 40, (a) \"yes\" or 'no'. def sum_of(a, b): return a + b  # by 13 + 789"


@frozen(kw_only=True)
class Job:
    """The inputs of the processes of a training gang: the settings, and the policy of the first one."""

    config: RunConfig
    directory: RunDirectory
    policy: PolicyTrainer
    supervised: SupervisedData | None = None
    """The conversations of a phase sft; ``None`` without one."""
    counters: Mapping[str, Any] | None = field(default=None)
    """The counters of the checkpoint that the run resumes from; ``None`` for a new run."""


def load_supervised(config: RunConfig) -> SupervisedData | None:
    """Load the conversations of the phase sft; return ``None`` without one. Blocks.

    Raises ``DatasetError`` for conversations that cannot be trained on, and ``ConfigError`` for rollouts of another
    tokenizer.
    """
    settings = config.sft
    if PhaseName.SFT not in config.phases or settings is None:
        return None
    from transformers import AutoConfig

    renderer = load_rendering(config)
    # As many tokens as the model, and the engine in this process, can hold.
    limits = [model_shape(AutoConfig.from_pretrained(resolve_model(config.model).path)).max_positions]
    limits += [config.engine.max_length] if config.rollout.backend is Backend.TORCH else []
    max_tokens = min((limit for limit in limits if limit), default=None)
    if settings.run is not None:
        groups = load_rollouts(Path(settings.run), renderer, min_reward=settings.min_reward, max_tokens=max_tokens)
    else:
        assert settings.jsonl is not None
        groups = load_conversations(Path(settings.jsonl), renderer, max_tokens=max_tokens)
    if len(groups) < settings.batch_size:
        raise DatasetError(
            f"sft.batch_size is {settings.batch_size}, and there are {len(groups)} conversations in "
            f"{settings.run or settings.jsonl}; lower it, or give more."
        )
    return SupervisedData(groups=groups, batch_size=settings.batch_size, seed=config.seed)


def load_rendering(config: RunConfig) -> Renderer:
    """Load the renderer, which converts between messages and token ids."""
    return load_renderer(resolve_model(config.tokenizer or config.model).path, config=config.renderer)


def load_held_out(config: RunConfig) -> dict[str, Problems]:
    """Load the sets of held-out problems by name. Blocks."""
    return {name: load_set(config, one, name=name, is_held_out=True) for name, one in config.held_out_sets.items()}


def load_set(config: RunConfig, dataset: DatasetConfig, *, name: str = "", is_held_out: bool = False) -> Problems:
    """Load the dataset of this name, and check that its problems can run in its agent's sandbox. Blocks.

    Raises ``DatasetError``, naming the setting if there are several datasets.
    """
    setting = f"eval_datasets.{name}" if is_held_out else f"sources.{name}"
    with _naming(setting if name else "eval_dataset" if is_held_out else "", source=name):
        problems = load_problems(dataset, import_reference=import_reference, shuffle_seed=config.seed)
        rollout = config.agents.get(name, config.rollout)
        if isinstance(rollout.workflow, CommandConfig):
            for problem in problems.all() if plugin_names(PluginGroup.PROBLEMS) else ():
                if (environment := find_environment(problem.data)) is not None:
                    environment.check(problem.data, rollout.openai.sandbox)
        return problems


@contextmanager
def _naming(setting: str, *, source: str) -> Iterator[None]:
    """Name the setting in errors of the problems or the agent of a source, and the source's own settings."""
    try:
        yield
    except (DatasetError, WorkflowError, SandboxError) as error:
        if not setting:
            raise
        text = str(error).replace("rollout.openai.sandbox", f"sources.{source}.sandbox") if source else str(error)
        kind = next(kind for kind in (DatasetError, WorkflowError, SandboxError) if isinstance(error, kind))
        raise kind(f"{setting}: {text}") from error


def load_training_problems(config: RunConfig) -> dict[str, Problems]:
    """Load the problems to train on by source; those without a source have the empty name. Blocks."""
    return {name: load_set(config, one, name=name) for name, one in config.training_sets.items()}


def load_problem_sets(
    config: RunConfig, *, is_external: bool
) -> tuple[Mapping[str, Problems] | None, Mapping[str, Problems]]:
    """Return the problems to train on by source, and the sets of held-out ones by name. Blocks.

    If ``is_external``, there are only held-out ones (``None``), since agents bring the problems to train on.
    """
    problems = (None if is_external else load_training_problems(config)) or None
    held_out = load_held_out(config)
    for datasets, loaded in ((config.training_sets, problems or {}), (config.held_out_sets, held_out)):
        for name, one in loaded.items():
            if (shortage := find_shortage(datasets[name], one)) is not None:
                _log.warning("dataset", detail=shortage)
    for name, found in held_out.items():
        num_shared = 0 if problems is None else find_overlap(found, *problems.values())
        if num_shared:
            named = {"set": name} if name else {}
            _log.warning("held_out_problems_are_trained_on", shared=num_shared, held_out=len(found), **named)
    return problems, held_out


def create_policy(config: RunConfig, model: ModelFiles, *, is_first: bool = True) -> PolicyTrainer:
    """Create the initial policy. Every process that trains it calls this function.

    A single process trains on ``trainer.device``. In a gang the first rank (``is_first``) loads the weights to the
    memory of its host, and sends the others their parts. Raises ``ConfigError`` for a device that is not available, and
    ``ModelError`` for files that are incomplete or do not fit.
    """
    from areal_actors.training.trainer import PolicyTrainer

    # The reference of an adapter is the same model without it.
    needs_reference = config.trainer.objective.kl.coefficient > 0 and config.trainer.lora is None
    load = load_policy if is_first else create_empty_policy
    reference = _place(load(model.path), config.trainer) if needs_reference else None
    teacher = None
    if (name := local_teacher(config)) is not None:
        teacher = _place(load(resolve_model(name, has_tokenizer=False).path), config.trainer)
    return PolicyTrainer(
        _place(load(model.path), config.trainer),
        config.trainer,
        reference=reference,
        # ``layout: tree`` refuses a model whose sliding window is shorter than the rows may be.
        max_length=config.engine.max_length if config.rollout.backend is Backend.TORCH else None,
        phases=config.training_phases,
        teacher=teacher,
    )


def local_teacher(config: RunConfig) -> str | None:
    """Return the model that the trainer loads for a distillation phase; ``None`` without one, or if a server has it."""
    if PhaseName.DISTILLATION not in config.phases or config.distillation is None:
        return None
    teacher = config.distillation.teacher
    return teacher.model if teacher.url is None else None


def _place(model: Any, config: TrainerConfig) -> Any:
    import torch

    # The ranks place the model when they form the gang.
    if config.gang.num_processes > 1:
        return model
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"trainer.device: the model cannot be moved to {device!r}: {reason}. Use auto or cpu, or install a build "
            "of torch for that device."
        ) from error


def prepare_agent(
    rollout: RolloutConfig, *, workflow: Any = None, workflow_kwargs: Mapping[str, Any] | None = None, logs: Path
) -> AbstractAsyncContextManager[Agent | RolloutWorkflow]:
    """Return a context manager that opens the agent and ends its processes on exit.

    ``workflow`` with ``workflow_kwargs`` replaces the agent that the configuration names. Raises ``WorkflowError`` for
    errors that can be found without starting a process, and ``SandboxError`` if its sandbox cannot be opened here;
    entering the context manager raises ``WorkflowError`` for all others.
    """
    target = rollout.workflow if workflow is None else workflow
    kwargs = rollout.workflow_kwargs if workflow is None else workflow_kwargs
    pool = PoolConfig(
        num_workers=rollout.openai.subproc_max_workers,
        start_timeout_seconds=rollout.openai.subproc_start_timeout_seconds,
        logs=logs,
    )
    config = rollout.openai.sandbox
    if isinstance(target, CommandConfig):
        if kwargs:
            raise WorkflowError(
                f"workflow_kwargs {sorted(kwargs)} were given with a command; make them arguments of it."
            )
        if config.is_isolated:
            create_sandbox(config.backend).check(config)
        return CommandAgent.open(target, pool, sandbox=config)
    if isinstance(target, PluginWorkflow):
        if kwargs:
            raise WorkflowError(
                f"workflow_kwargs {sorted(kwargs)} were given with {target.name}; make them settings of it."
            )
        if config.is_isolated:
            create_sandbox(config.backend).check(config)
        return target.plugin.prepare(config, pool if rollout.openai.mode is AgentMode.SUBPROCESS else None)
    if config.is_isolated:
        raise WorkflowError(
            f"rollout.openai.sandbox: {config.backend} isolates agents that are commands, and {target} runs in a "
            "Python process of the run; name it as {command: [python, file.py]}, or set rollout.openai.sandbox: none."
        )
    if rollout.openai.mode is AgentMode.SUBPROCESS:
        return AgentPool.open(serialize_agent(target, kwargs), pool)
    return _open_inline(resolve_workflow(target, workflow_kwargs=kwargs))


def prepare_agents(
    config: RunConfig, *, workflow: Any = None, workflow_kwargs: Mapping[str, Any] | None = None, logs: Path
) -> AbstractAsyncContextManager[Agents]:
    """Return a context manager that opens all agents of a run; see ``prepare_agent``."""
    prepared = {}
    for name, rollout in config.agents.items():
        if name:
            with _naming(f"sources.{name}", source=name):
                prepared[name] = prepare_agent(rollout, logs=logs / name)
        elif workflow is not None or rollout.workflow is not None:
            prepared[name] = prepare_agent(rollout, workflow=workflow, workflow_kwargs=workflow_kwargs, logs=logs)

    @asynccontextmanager
    async def open_all() -> AsyncIterator[Agents]:
        async with AsyncExitStack() as stack:
            stack.enter_context(direct_connections(config.proxy.host))
            agents = {}
            for name, opening in prepared.items():
                with _naming(f"sources.{name}" if name else "", source=name):
                    agents[name] = await stack.enter_async_context(opening)
            yield agents

    return open_all()


@asynccontextmanager
async def _open_inline(agent: Agent | RolloutWorkflow) -> AsyncIterator[Agent | RolloutWorkflow]:
    with placeholder_keys():
        yield agent


@asynccontextmanager
async def open_group_teacher(config: RunConfig, renderer: Renderer) -> AsyncIterator[GroupTeacher | None]:
    """Connect to the teacher's server; yield ``None`` if there is no distillation phase, or the trainer has the model.

    Raises as ``checks.check_teacher`` does.
    """
    settings = config.distillation
    if PhaseName.DISTILLATION not in config.phases or settings is None or settings.teacher.url is None:
        yield None
        return
    # Plain words, and a conversation with the template's special tokens.
    plain = renderer.encode(_PLAIN_TEXT, is_start=False)
    chat = renderer.render([ChatMessage(role="user", content=_PLAIN_TEXT)])
    probes = [
        Probe(token_ids=as_ints(ids), texts=[renderer.decode(as_ints(np.array([token_id]))) for token_id in ids])
        for ids in (plain, chat)
    ]
    before = [phase.num_steps or 0 for phase in config.training_phases]
    index = config.phases.index(PhaseName.DISTILLATION)
    async with open_teacher(
        settings.teacher.url,
        probes=tuple(probes),
        model=settings.teacher.model,
        api_key=settings.teacher.api_key,
        max_concurrent=settings.teacher.max_concurrent,
        timeout_seconds=settings.teacher.timeout_seconds,
    ) as teacher:
        first = sum(before[:index]) + 1
        yield GroupTeacher(score=teacher.score, first_step=first, last_step=sum(before[: index + 1]))
