"""The settings of a run: one class that composes the settings of all components.

Each section is a frozen class defined with the component that it configures. ``RolloutConfig`` and ``AgentConfig`` are
those of the runner and of the exporter with the settings of others beside them. Words such as ``mode: inline`` are
resolved to members of enumerations; nothing below compares strings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NewType

from attrs import Attribute, evolve, field, fields, frozen
from attrs.validators import and_, ge, gt, le, lt, optional

from areal_actors.dashboard import DisplayStyle, RunDirectory, parse_trackers
from areal_actors.datasets import (
    DataPath,
    DatasetConfig,
    DifficultyConfig,
)
from areal_actors.domain import EpisodeLimits, Role
from areal_actors.generation.model_host import ModelsConfig
from areal_actors.generation.servers.config import AdapterSlots, Backend, ServedEngine, ServerSections
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.journal import JournalConfig
from areal_actors.lib.loops import EventLoop
from areal_actors.lib.plugins import PluginGroup, plugin_settings
from areal_actors.lib.settings import COMMON, constant
from areal_actors.proxy import ProxyConfig
from areal_actors.rendering import RendererConfig
from areal_actors.rollouts.draws import DrawConfig
from areal_actors.rollouts.exporter import ExportConfig, QueueConfig
from areal_actors.rollouts.runner import RolloutsConfig
from areal_actors.rollouts.staleness import CapacityLimits, StaleGroups
from areal_actors.sandbox import SandboxConfig
from areal_actors.schedulers.config import SchedulerConfig, SchedulerType
from areal_actors.sessions.intake import IntakeConfig
from areal_actors.sessions.manager import SessionsConfig, TemperatureRule
from areal_actors.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    KlPlace,
    LoraServing,
    StopConfig,
    TrainerConfig,
    TrainingPlan,
)
from areal_actors.training.phases import Phase, PhaseName, distillation_phase, sft_phase
from areal_actors.workflows import GenerationConfig, PluginWorkflow
from areal_actors.workflows.commands import CommandConfig

ModelName = NewType("ModelName", str)
"""The name of a model, or the absolute path of its directory."""

WorkflowReference = NewType("WorkflowReference", str)
"""``/absolute/file.py:Class``, ``module:Class`` or ``package.module.Class``."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""Names become directories and parts of URLs."""
_NAME_RULE = "use letters, digits, '.', '_' and '-', a letter or digit first"


def _check_name(_: object, __: object, name: str) -> None:
    """Reject names that would be other directories, or no directory."""
    if not re.fullmatch(_NAME, name):
        raise ValueError(f"cannot be {name!r}; {_NAME_RULE}")


class AgentMode(StrEnum):
    """The place where agents run."""

    INLINE = "inline"
    """In the event loop of this process."""
    SUBPROCESS = "subprocess"
    """In child processes, where they may block; also called subproc."""

    @classmethod
    def _missing_(cls, value: object) -> AgentMode | None:
        return cls.SUBPROCESS if value == "subproc" else None


_finite_not_negative: Any = and_(ge(0.0), lt(math.inf))


@frozen(kw_only=True)
class AgentConfig(ExportConfig):
    """How agents are run, and how their rewards become training rows (also called rollout.agent)."""

    mode: AgentMode = field(default=AgentMode.INLINE, metadata=COMMON)
    """inline runs agents in the event loop of the run; in a subprocess, agents may block."""
    subproc_max_workers: int = field(default=4, validator=[ge(1), le(4_096)])
    """Agent processes that run at the same time, in mode subprocess and for commands."""
    subproc_start_timeout_seconds: float = constant(60.0)
    """How long an agent process may take to import the agent's module and create the agent."""
    agents_may_reward: bool = False
    """Whether an agent may reward and end its own session over HTTP.

    Otherwise its key and its URL only allow requests to the model, so that it cannot forge its reward; it returns its
    reward.
    """
    sandbox: SandboxConfig = field(factory=SandboxConfig)


@frozen(kw_only=True)
class SamplingConfig:
    """What the run decides about the sampling of agents' requests."""

    temperature: TemperatureRule = TemperatureRule.AS_REQUESTED
    """as_requested samples at the temperature of the request, and tokens at 0 are not trained; override replaces it by
    trainer.temperature; minimum raises it to that. Evaluations sample as requested."""


@frozen(kw_only=True)
class RolloutConfig(RolloutsConfig):
    """The agent, how many episodes it runs, and how far rollouts may run ahead of training."""

    backend: Backend = field(default=Backend.TORCH, metadata=COMMON)
    """The engine: torch is the embedded engine, with the settings of engine; sglang and vllm are servers."""
    workflow: WorkflowReference | CommandConfig | PluginWorkflow | None = field(default=None, metadata=COMMON)
    """The agent or rollout workflow: file.py:Class or package.module.Class; or {command: [program, argument]}, with
    a grader and files; or an agent of a plug-in, such as {verifiers: {taskset: id}} of areal-actors-environments. With
    serve, it is run on the problems of eval_dataset only."""
    workflow_kwargs: Mapping[str, Any] = field(factory=dict)
    """Arguments of its class."""
    max_concurrent_rollouts: int = field(default=16, validator=ge(1), metadata=COMMON)
    """Groups that run at the same time."""
    max_head_offpolicyness: int = field(default=1, validator=ge(0), metadata=COMMON)
    """The number of versions by which a group may be older than the trained weights; 0 is synchronous."""
    stale_groups: StaleGroups = StaleGroups.WAIT
    """The treatment of groups that would be older: wait makes steps wait for them before they are too old; train trains
    them at any age; requeue and drop discard them, so that fewer long episodes are trained than are sampled. With
    serve, wait and requeue mean train."""
    difficulty: DifficultyConfig = field(factory=DifficultyConfig)
    sampling: SamplingConfig = field(factory=SamplingConfig)
    max_step_seconds: float | None = field(default=None, validator=optional(gt(0)))
    """A step that waits longer than this for its groups ends the run with an error."""
    dump_to_file: bool = True
    """Whether every training row is written to rollout/<version>/<task>.jsonl in the run directory."""
    openai: AgentConfig = field(factory=AgentConfig)

    @property
    def export(self) -> ExportConfig:
        """The settings of the exporter."""
        return evolve(self.openai, train_roles=self.train_roles)


def _problems_of(workflow: WorkflowReference | CommandConfig | PluginWorkflow | None) -> DatasetConfig | None:
    return workflow.plugin.problems if isinstance(workflow, PluginWorkflow) else None


@frozen(kw_only=True)
class SourceConfig:
    """One of several sources of problems, with its agent and limits."""

    dataset: DatasetConfig | None = None
    """Its problems; by default those of an agent of a plug-in that has some, such as a taskset of verifiers."""
    weight: float = field(default=1.0, validator=and_(gt(0.0), lt(math.inf)))
    """Its share of the groups, in relation to the weights of the others."""
    workflow: WorkflowReference | CommandConfig | PluginWorkflow | None = None
    """Its agent; by default rollout.workflow."""
    workflow_kwargs: Mapping[str, Any] = field(factory=dict)
    """Arguments of its class."""
    group_size: int | None = field(default=None, validator=optional(and_(ge(1), le(65_536))))
    """By default rollout.group_size."""
    episode_timeout_seconds: float | None = field(default=None, validator=optional(gt(0)))
    """By default rollout.episode_timeout_seconds."""
    max_tokens: int | None = field(default=None, validator=optional(ge(1)))
    """By default rollout.max_tokens."""
    limits: EpisodeLimits | None = None
    """By default rollout.limits."""
    sandbox: SandboxConfig | None = None
    """By default rollout.openai.sandbox."""
    difficulty: DifficultyConfig | None = None
    """By default rollout.difficulty. Each source has its own pools."""

    @property
    def problems(self) -> DatasetConfig | None:
        """The source of its problems: ``dataset``, or that of its agent."""
        return self.dataset or _problems_of(self.workflow)

    def configure(self, rollout: RolloutConfig) -> RolloutConfig:
        """Return the settings of its episodes: its own, and for all others those of ``rollout``."""
        is_own = self.workflow is not None
        return evolve(
            rollout,
            workflow=self.workflow if is_own else rollout.workflow,
            workflow_kwargs=self.workflow_kwargs if is_own else rollout.workflow_kwargs,
            group_size=self.group_size or rollout.group_size,
            episode_timeout_seconds=self.episode_timeout_seconds or rollout.episode_timeout_seconds,
            max_tokens=self.max_tokens or rollout.max_tokens,
            limits=self.limits or rollout.limits,
            openai=evolve(rollout.openai, sandbox=self.sandbox or rollout.openai.sandbox),
            difficulty=self.difficulty or rollout.difficulty,
        )


@frozen(kw_only=True)
class ServeConfig:
    """How serve combines the sessions of external agents into groups, and when it ends."""

    group_timeout_seconds: float = field(default=600.0, validator=gt(0))
    """How long a group waits for members that do not start; then it is trained without them."""
    exit_when_trained: bool = False
    """End after the last step, instead of answering with the trained weights until Ctrl-C or SIGTERM."""


@frozen(kw_only=True)
class SftConfig:
    """The phase sft: supervised steps on conversations, which minimise the negative log-likelihood of the answers.

    Conversations come from a JSONL file in OpenAI's or Anthropic's form, or from the rollouts of an earlier run.
    """

    jsonl: DataPath | None = None
    """A file with one conversation on each line: messages, and optionally tools and system."""
    run: DataPath | None = None
    """The directory of a run, whose rollouts are trained on; its model must have the same tokenizer."""
    min_reward: float | None = field(default=None, validator=optional(and_(gt(-math.inf), lt(math.inf))))  # no NaN
    """With run: only the episodes in which an answer returned at least this are trained on."""
    steps: int | None = field(default=None, validator=optional(ge(1)))
    """Number of steps; by default what total_steps leaves."""
    batch_size: int = field(default=8, validator=ge(1))
    """Conversations per step."""
    learning_rate: float | None = field(default=None, validator=optional(gt(0)))
    """By default that of trainer.optimizer."""

    def __attrs_post_init__(self) -> None:
        """Raise ``ValueError`` unless exactly one source is named."""
        if (self.jsonl is None) == (self.run is None):
            raise ValueError("name one source of conversations, jsonl or run")
        if self.run is None and self.min_reward is not None:
            raise ValueError("min_reward chooses rollouts of a run; conversations of a jsonl file have no reward")


@frozen(kw_only=True)
class TeacherConfig:
    """The model that a distillation phase imitates: a directory, or a server. It must have the same tokenizer."""

    model: ModelName | None = None
    """A name or a directory, as for model, loaded by the trainer; with url, the name that the server knows."""
    url: str | None = None
    """A server that returns the log-probabilities of prompts: vLLM, SGLang, or any with echo and logprobs."""
    api_key: str | None = field(default=None, repr=False)
    max_concurrent: int = constant(16)
    """Requests to the server at the same time."""
    timeout_seconds: float = constant(120.0)
    """How long the server may take to score a row, before the request is sent again."""

    def __attrs_post_init__(self) -> None:
        """Raise ``ValueError`` without a model."""
        if self.model is None and self.url is None:
            raise ValueError("name the model of the teacher, or the url of a server")


@frozen(kw_only=True)
class DistillationConfig:
    """The phase distillation: the student learns what a teacher would have said, from its own answers.

    The advantage of a token is coefficient times log teacher/student, the reverse KL divergence of one token, plus
    reward_coefficient times the advantage of its reward.
    """

    teacher: TeacherConfig
    coefficient: float = field(default=1.0, validator=gt(0))
    reward_coefficient: float = field(default=0.0, validator=_finite_not_negative)
    steps: int | None = field(default=None, validator=optional(ge(1)))
    """Number of steps; by default what total_steps leaves."""
    learning_rate: float | None = field(default=None, validator=optional(gt(0)))
    """By default that of trainer.optimizer."""


@frozen(kw_only=True)
class RowDumpsConfig:
    """Rows of training steps as parquet files, rows/step-<n>.parquet, for analysis and for other trainers."""

    every_steps: int = field(default=0, validator=ge(0))
    """Interval of the steps whose rows are written; 0 writes none. Needs pyarrow (the extra parquet)."""
    keep: int | None = field(default=None, validator=optional(ge(1)))
    """Number of files to keep, the newest; null keeps all."""


def _check_trackers(_: object, __: object, entries: Sequence[str | Mapping[str, Any]]) -> None:
    parse_trackers(entries)


@frozen(kw_only=True)
class LoggingConfig:
    """The display of a run, and the output that it keeps."""

    display: DisplayStyle = DisplayStyle.AUTO
    """auto uses rich output at a terminal and plain lines elsewhere."""
    trackers: tuple[str | Mapping[str, Any], ...] = field(
        default=("tensorboard",), validator=_check_trackers, metadata=COMMON
    )
    """Experiment trackers that get the numbers of metrics.jsonl: tensorboard, wandb, mlflow or trackio.

    Each is a name, or {name: options} with options of its client, such as those of wandb.init.
    """
    max_sessions: int = constant(120)
    """Number of conversations to keep for the run report, spread over all versions."""
    row_dumps: RowDumpsConfig = field(factory=RowDumpsConfig)
    page: bool = True
    """Whether train and serve show the run in a browser, at a URL on this machine that the display prints."""
    page_port: int = field(default=0, validator=[ge(0), le(65535)])
    """The port of that page; 0 takes any free one."""

    @property
    def tracker_options(self) -> dict[str, Mapping[str, Any]]:
        """The options of each tracker of the run, by name."""
        return parse_trackers(self.trackers)


def _check_publish(run: RunConfig, _: object, trainer: TrainerConfig) -> None:
    """Reject router replay with servers whose experts are not read."""
    rollout = getattr(run, "rollout", None)
    if trainer.router_replay and rollout is not None and not rollout.backend.records_experts:
        raise ValueError(
            "router_replay needs the experts that the embedded engine and SGLang record, and rollout.backend is "
            f"{rollout.backend}, whose experts are not read; use torch or sglang, or leave router_replay out"
        )


def _check_scheduler(_run: object, _: object, scheduler: SchedulerConfig) -> None:
    """Reject a cluster without jobs."""
    if scheduler.type is SchedulerType.SLURM and not scheduler.roles.placed:
        raise ValueError(
            "type is slurm, and no role is placed, so that everything would run in this process; name the roles that "
            "are jobs, such as roles: {trainer: {gpus: 1}, generation: {gpus: 1}}"
        )


def _check_sources(run: RunConfig, _: object, sources: Mapping[str, SourceConfig]) -> None:
    """Reject names that cannot be parts of keys, and sources that lack something."""
    if sources and run.dataset is not None:
        raise ValueError("are given, and there is dataset; make it one of them")
    for name, source in sources.items():
        if not re.fullmatch(_NAME, name):
            raise ValueError(f"has the name {name!r}; {_NAME_RULE}")
        if source.problems is None:
            raise ValueError(f"has no dataset for {name}")
        if source.workflow is None and source.workflow_kwargs:
            raise ValueError(f"has workflow_kwargs for {name}, and no workflow")
    for name in run.held_out_sets if sources and run.rollout.workflow is None else ():
        if name not in sources:
            raise ValueError(
                f"has no agent for the held-out problems {name or 'of eval_dataset'}; name them like a source in "
                "eval_datasets, or give rollout.workflow"
            )


def _check_eval_datasets(run: RunConfig, _: object, named: Mapping[str, DatasetConfig]) -> None:
    """Reject names that cannot be part of a file's name, and named sets next to the one without a name."""
    wrong = [name for name in named if not re.fullmatch(_NAME, name)]
    if wrong:
        raise ValueError(f"has the name {wrong[0]!r}; {_NAME_RULE}")
    # Names of Prometheus have neither dots nor dashes.
    by_metric: dict[str, str] = {}
    for name in named:
        other = by_metric.setdefault(re.sub("[.-]", "_", name), name)
        if other != name:
            raise ValueError(f"names {other} and {name}, whose metrics would have the same names; rename one")
    if named and getattr(run, "eval_dataset", None) is not None:
        raise ValueError(f"names {', '.join(named)}, and there is eval_dataset; give that a name here, too")


def _check_phases(run: RunConfig, _: object, phases: tuple[PhaseName, ...]) -> None:
    """Reject phases that have no section or no steps, or that cannot follow one another."""
    if not phases:
        raise ValueError("names no phase; use [rl], [sft, rl] or [sft, distillation, rl]")
    if len(set(phases)) < len(phases):
        raise ValueError("names a phase twice, and each has one section")
    if PhaseName.SFT in phases[1:]:
        raise ValueError("has sft after a phase in which agents run; put it first")
    sections = {PhaseName.SFT: run.sft, PhaseName.DISTILLATION: run.distillation}
    for name in phases:
        if name in sections and sections[name] is None:
            raise ValueError(f"names {name}, and there is no section {name}; add it, or leave the phase out")
    if PhaseName.SFT in phases and run.trainer.objective.kl.coefficient:
        raise ValueError(
            "has sft, and trainer.objective.kl would pull back to the model before it; run phases [sft] first, then "
            "set model to the weights of that run"
        )
    kl = run.trainer.objective.kl
    if PhaseName.DISTILLATION in phases and kl.coefficient and kl.place is KlPlace.REWARD:
        raise ValueError(
            "has distillation, whose advantages are those of the teacher; set trainer.objective.kl.place to loss"
        )
    if PhaseName.DISTILLATION in phases and run.trainer.advantages.drop_zero_variance:
        raise ValueError(
            "has distillation, which trains groups without a reward signal; set advantages.drop_zero_variance to false"
        )
    _check_steps(phases, {name: section.steps for name, section in sections.items() if section}, run.total_steps)


def _check_steps(phases: tuple[PhaseName, ...], steps: Mapping[PhaseName, int | None], total_steps: int) -> None:
    """Reject phases whose steps do not add up to ``total_steps``, of which one phase may take what is left."""
    known = {name: steps[name] for name in phases if steps.get(name)}
    counted = " and ".join(f"{name} has {number}" for name, number in known.items())
    rest = [name for name in phases if name not in known]
    left = total_steps - sum(number or 0 for number in known.values())
    if len(rest) > 1:
        named = " and ".join(f"{name}.steps" for name in rest if name is not PhaseName.RL)
        raise ValueError(f"leaves open how long {' and '.join(rest)} are; set {named}")
    if rest and left < 1:
        raise ValueError(f"leaves no steps for {rest[0]}: {counted}, and total_steps is {total_steps}")
    if not rest and left:
        raise ValueError(f"do not add up: {counted} steps, and total_steps is {total_steps}")


def _move_sections(_: type, found: list[Attribute[Any]]) -> list[Attribute[Any]]:
    """Have the sections of servers follow that of the embedded engine."""
    names = {each.name for each in fields(ServerSections)}
    own = [each for each in found if each.name not in names]
    after = next(index for index, each in enumerate(own) if each.name == "engine") + 1
    return [*own[:after], *(each for each in found if each.name in names), *own[after:]]


@frozen(kw_only=True, field_transformer=_move_sections)
class RunConfig(ServerSections):
    """A run: the model, the agent that it learns from, and the settings of each component."""

    experiment_name: str = field(validator=_check_name, metadata=COMMON)
    trial_name: str = field(default="trial", validator=_check_name, metadata=COMMON)
    fileroot: Path = field(factory=lambda: Path("runs").absolute(), metadata=COMMON)
    """Runs are written to <fileroot>/<experiment_name>/<trial_name>."""
    seed: int = field(default=1, validator=and_(ge(0), le(2**63 - 1)))
    total_steps: int = field(validator=ge(1), metadata=COMMON)
    """Number of steps of all phases together."""
    batch_size: int = field(default=8, validator=ge(1), metadata=COMMON)
    """Groups per step."""
    model: ModelName = field(metadata=COMMON)
    """A name, the path of a directory that transformers can load, or an id of the Hugging Face hub (owner/name, or
    owner/name@revision)."""
    tokenizer: ModelName | None = None
    """The source of the tokenizer and its chat template; by default the model."""
    phases: tuple[PhaseName, ...] = field(default=(PhaseName.RL,), validator=_check_phases)
    """What a run does, in this order: sft, distillation, rl. All but rl have a section; the steps are counted on."""
    sft: SftConfig | None = None
    distillation: DistillationConfig | None = None
    dataset: DatasetConfig | None = None
    """The problems that train works on; by default those of an agent of a plug-in that has some. serve trains on the
    problems of external agents."""
    eval_dataset: DatasetConfig | None = None
    """The held-out problems, which are never trained on."""
    eval_datasets: Mapping[str, DatasetConfig] = field(factory=dict, validator=_check_eval_datasets)
    """Several sets of held-out problems by their names, each reported separately; instead of eval_dataset."""
    sources: Mapping[str, SourceConfig] = field(factory=dict, validator=_check_sources)
    """Several datasets by their names, each with its agent and its share of the groups; instead of dataset. The set of
    eval_datasets with the name of a source is run by its agent."""
    rollout: RolloutConfig = field(factory=RolloutConfig)
    journal: JournalConfig = field(factory=JournalConfig)
    serve: ServeConfig = field(factory=ServeConfig)
    gconfig: GenerationConfig = field(factory=GenerationConfig)
    engine: TorchEngineConfig = field(factory=TorchEngineConfig)
    renderer: RendererConfig = field(factory=RendererConfig)
    proxy: ProxyConfig = field(factory=ProxyConfig)
    trainer: TrainerConfig = field(factory=TrainerConfig, validator=_check_publish)
    evaluation: EvaluationConfig = field(factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    stop: StopConfig = field(factory=StopConfig)
    sessions: SessionsConfig = field(factory=SessionsConfig)
    models: ModelsConfig = field(factory=ModelsConfig)
    logging: LoggingConfig = field(factory=LoggingConfig)
    scheduler: SchedulerConfig = field(factory=SchedulerConfig, validator=_check_scheduler)
    plugins: Mapping[str, Any] = plugin_settings(PluginGroup.SECTIONS)
    """Sections of plug-ins, by name."""
    event_loop: EventLoop = EventLoop.ASYNCIO
    """The event loop of the run's processes, except those of agents. uvloop (pip install "areal_actors[uvloop]") serves
    streams with less CPU time."""

    @property
    def run_directory(self) -> RunDirectory:
        """The default directory of the run."""
        return RunDirectory(path=self.fileroot / self.experiment_name / self.trial_name)

    @property
    def training_sets(self) -> Mapping[str, DatasetConfig]:
        """The problems that train works on, by source; those of ``dataset`` or the agent have no name."""
        if self.sources:
            named = self.sources.items()
            return {name: found for name, source in named if (found := source.problems) is not None}
        found = self.dataset or _problems_of(self.rollout.workflow)
        return {} if found is None else {"": found}

    @property
    def agents(self) -> Mapping[str, RolloutConfig]:
        """The settings of episodes by source; those of problems without a source have the empty name."""
        named = {name: source.configure(self.rollout) for name, source in self.sources.items()}
        return named if self.sources and self.rollout.workflow is None else {"": self.rollout} | named

    @property
    def missing_agents(self) -> tuple[str, ...]:
        """The settings that name no agent for problems to train on."""
        return tuple(
            f"sources.{name}.workflow" if name else "rollout.workflow"
            for name, rollout in self.agents.items()
            if rollout.workflow is None
        )

    @property
    def runners(self) -> Mapping[str, RolloutsConfig]:
        """The settings of the rollout runner for each entry of ``agents``, and for episodes without an agent."""
        return {
            name: evolve(
                rollout,
                agents_may_reward=rollout.openai.agents_may_reward,
                max_concurrent_evaluations=self.evaluation.max_concurrent,
            )
            for name, rollout in {"": self.rollout, **self.agents}.items()
        }

    @property
    def temperature_bounds(self) -> tuple[float, float]:
        """The lowest and the highest temperature at which requests are sampled in training."""
        return self.rollout.sampling.temperature.bounds(self.trainer.temperature)

    @property
    def held_out_sets(self) -> Mapping[str, DatasetConfig]:
        """The sets of held-out problems by name; the only set has the empty name unless it was given one."""
        return self.eval_datasets if self.eval_dataset is None else {"": self.eval_dataset}

    @property
    def plan(self) -> TrainingPlan:
        """The trainer actor's part of these settings."""
        return TrainingPlan(
            total_steps=self.total_steps,
            batch_size=self.batch_size,
            max_staleness=self.rollout.max_head_offpolicyness,
            evaluation=self.evaluation,
            checkpoint=self.checkpoint,
            stop=self.stop,
            num_warm_steps=self.num_warm_steps,
            max_step_seconds=self.rollout.max_step_seconds,
            rows_every_steps=self.logging.row_dumps.every_steps,
        )

    @property
    def training_phases(self) -> tuple[Phase, ...]:
        """The phases with their settings. The one that takes the steps left over has their number, too."""
        known = {PhaseName.SFT: self.sft, PhaseName.DISTILLATION: self.distillation}
        given = {name: section.steps for name, section in known.items() if section is not None and name in self.phases}
        left = self.total_steps - sum(number or 0 for number in given.values())
        phases = []
        for name in self.phases:
            num_steps = given.get(name) or left
            if name is PhaseName.SFT and self.sft is not None:
                phase = sft_phase(self.trainer, num_steps=num_steps, learning_rate=self.sft.learning_rate)
            elif name is PhaseName.DISTILLATION and self.distillation is not None:
                phase = distillation_phase(
                    self.trainer,
                    num_steps=num_steps,
                    learning_rate=self.distillation.learning_rate,
                    coefficient=self.distillation.coefficient,
                    reward_coefficient=self.distillation.reward_coefficient,
                )
            else:
                phase = Phase(num_steps=num_steps, config=self.trainer)
            phases.append(phase)
        return tuple(phases)

    @property
    def num_warm_steps(self) -> int:
        """The number of supervised steps, which come before all others."""
        return sum(phase.num_steps or 0 for phase in self.training_phases if phase.name is PhaseName.SFT)

    @property
    def has_rollouts(self) -> bool:
        """Whether agents' episodes are trained in any phase."""
        return self.phases != (PhaseName.SFT,)

    @property
    def trained_models(self) -> ModelsConfig:
        """The settings of the host of trained models, which by default are looked up where this run writes its own."""
        return evolve(self.models, fileroot=self.models.fileroot or self.fileroot)

    @property
    def embedded_engine(self) -> TorchEngineConfig:
        """The settings of the embedded engine, which records experts for a trainer that replays them."""
        records = self.engine.return_routed_experts or self.trainer.router_replay is not False
        return evolve(self.engine, return_routed_experts=records)

    @property
    def serves_adapters(self) -> bool:
        """Whether inference servers load the trained adapter themselves, next to the base model."""
        lora = self.trainer.lora
        return lora is not None and lora.serving is LoraServing.ADAPTER and self.rollout.backend is not Backend.TORCH

    def served_engine(self, directory: Path) -> ServedEngine | None:
        """Return the inference servers, with logs and weights in ``directory``; ``None`` for the embedded engine."""
        if self.rollout.backend is Backend.TORCH:
            return None
        lora, adapters = self.trainer.lora, None
        if lora is not None and self.serves_adapters:
            modules = () if lora.target_modules == ("all-linear",) else lora.target_modules
            adapters = AdapterSlots(rank=lora.rank, modules=modules)
        return ServedEngine(
            backend=self.rollout.backend,
            config=getattr(self, self.rollout.backend),
            directory=directory,
            adapters=adapters,
            records_experts=bool(self.trainer.router_replay),
        )

    def num_tasks(self, role: Role) -> int:
        """Return the number of processes of a worker of this role."""
        return self.trainer.gang.num_processes if role is Role.TRAINER else 1

    @property
    def intake(self) -> IntakeConfig:
        """The part of these settings for the intake of external sessions."""
        return IntakeConfig(
            group_size=self.rollout.group_size,
            group_timeout_seconds=self.serve.group_timeout_seconds,
            grace_seconds=self.sessions.lifetimes.grace_seconds,
            seed=self.seed,
        )

    @property
    def queue(self) -> QueueConfig:
        """The settings that decide which finished groups are trained."""
        advantages = self.trainer.advantages
        max_replaced = advantages.max_refills * self.batch_size if advantages.drop_zero_variance else 0
        return QueueConfig(
            stale_groups=self.rollout.stale_groups,
            max_replaced=max_replaced,
            difficulty=self.rollout.difficulty,
            sources={
                name: DrawConfig(weight=source.weight, difficulty=source.difficulty or self.rollout.difficulty)
                for name, source in self.sources.items()
            },
            seed=self.seed,
        )

    @property
    def limits(self) -> CapacityLimits:
        """How far rollouts may run ahead of training, and how many groups a run consumes."""
        return CapacityLimits(
            max_concurrent=self.rollout.max_concurrent_rollouts,
            max_staleness=self.rollout.max_head_offpolicyness,
            batch_size=self.batch_size,
            max_groups=(self.total_steps - self.num_warm_steps) * self.batch_size,
            first_version=self.num_warm_steps,
        )
