"""Load what the roles of a run need: run directory, problems, model, conversations, agent and teacher."""

from __future__ import annotations

import errno
import hashlib
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from attrs import field, frozen

from areal_actors.config import AgentMode, RolloutConfig, RunConfig, save_config
from areal_actors.dashboard import RunDirectory, require_trackers
from areal_actors.datasets import (
    DatasetConfig,
    Problems,
    find_overlap,
    load_problems,
)
from areal_actors.domain import ChatMessage, as_ints
from areal_actors.errors import (
    CheckpointError,
    ConfigError,
    CustomFunctionError,
    DatasetError,
    ModelError,
    RunDirectoryError,
    SandboxError,
    WorkflowError,
)
from areal_actors.generation.servers.config import Backend
from areal_actors.generation.servers.teacher import Probe, open_teacher
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.interchange import INSTALL_PARQUET, has_parquet
from areal_actors.journal import JournalConfig, settle
from areal_actors.journal.sqlite import filesystem_of, is_network
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.locks import NO_LOCKS, HeldLock, LockHeld, hold
from areal_actors.lib.plugins import PluginGroup, plugin_names
from areal_actors.lib.references import import_reference
from areal_actors.lib.scratch import remove_empty
from areal_actors.lib.telemetry import get_logger, redact_settings
from areal_actors.models import ModelFiles, create_empty_policy, load_policy, model_shape, resolve_model
from areal_actors.rendering import Renderer, TemplateRenderer, load_renderer
from areal_actors.rollouts.runner import Agents, ResumeEpisodes
from areal_actors.run.conversations import SupervisedData, load_conversations, load_rollouts
from areal_actors.sandbox import create_sandbox
from areal_actors.schedulers.accounting import find_machine
from areal_actors.schedulers.config import SchedulerType
from areal_actors.training.advice import compares_members, doubtful_settings, inert_settings
from areal_actors.training.phases import PhaseName
from areal_actors.training.teaching import GroupTeacher
from areal_actors.workflows import (
    Agent,
    AgentPool,
    CommandAgent,
    CommandConfig,
    PluginWorkflow,
    PoolConfig,
    RolloutWorkflow,
    find_environment,
    placeholder_keys,
    resolve_workflow,
    serialize_agent,
)

if TYPE_CHECKING:
    from areal_actors.training.config import TrainerConfig
    from areal_actors.training.trainer import PolicyTrainer

__all__ = [
    "Job",
    "ProblemSets",
    "advise",
    "create_policy",
    "directory_of",
    "load_held_out",
    "load_problem_sets",
    "load_rendering",
    "load_set",
    "load_supervised",
    "load_training_problems",
    "local_teacher",
    "log_advice",
    "no_checkpoint",
    "open_group_teacher",
    "open_policy",
    "prepare_agent",
    "prepare_agents",
    "prepared_directory",
    "require_memory",
    "require_packages",
    "sampling_digest",
    "warn_of_length",
    "warn_of_singletons",
]

_log = get_logger(__name__)

_BAD_INPUT = (ConfigError, ModelError, DatasetError, WorkflowError, SandboxError, CustomFunctionError)
"""Errors of the user's input, whose messages refer to no file of the run."""

_MAX_TRIES = 16
"""How often a start locks its directory while others, which fail, remove the directories above."""
_PLAIN_TEXT = "The answer is 42: two plus 40, (a) \"yes\" or 'no'. def sum_of(a, b): return a + b  # by 13 + 789"


@frozen(kw_only=True)
class ProblemSets:
    """The problems that agents are run on. ``train`` is ``None`` if external agents bring their own."""

    train: Mapping[str, Problems] | None = None
    """The problems to train on by source; those of a dataset without a source have the empty name."""
    held_out: Mapping[str, Problems] = field(factory=dict)
    """The sets of held-out problems by name."""


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


def directory_of(config: RunConfig, run_dir: Path | None) -> RunDirectory:
    """Return the run directory as an absolute path, so that reports and exports name it wherever they are read."""
    return config.run_directory if run_dir is None else RunDirectory(path=run_dir.absolute())


@contextmanager
def prepared_directory(config: RunConfig, directory: RunDirectory, *, resume: bool) -> Iterator[None]:
    """Create the run directory and lock it while the block runs; two runs in it would prune each other's checkpoints.

    An earlier run of the same name is moved aside unless ``resume`` is set. If the block finds bad input or is
    interrupted before the run has begun, what was made for it is removed and the earlier run moved back; a run that is
    not resumed keeps its settings. Settings of the steps before a resumption are kept as ``config.<n>.yaml`` if they
    differ. Raises ``ConfigError`` if the directory is in use, cannot be written, or has no run to resume, and if a
    package is missing; ``RunDirectoryError`` if the disk is full.
    """
    require_packages(config)
    require_memory(config)
    path, former, is_created, lock = directory.path, None, False, None
    foreign: frozenset[Path] = frozenset()
    parents: list[Path] = []
    with ExitStack() as stack:
        stack.callback(remove_empty, parents)
        try:
            try:
                lock = _lock(directory, stack, parents)
                if resume:
                    stack.enter_context(_resumed_settings(config, directory))
                else:
                    # Only after the lock is held: the earlier run may still be writing to this directory.
                    former, is_created = directory.set_aside(), True
                    if former is not None:
                        _log.info("earlier_run_kept", path=str(former))
                    path.mkdir(parents=True, exist_ok=True)
                    foreign = frozenset(path.iterdir()) - {directory.config, directory.logs}
                    save_config(config, directory.config)
            except OSError as error:
                # A disk that is full may have room later, so that a restart helps; other reasons stay.
                kind = RunDirectoryError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
                raise kind(
                    f"{path} cannot be written: {error.strerror}; set fileroot or --run-dir to a directory that can"
                ) from error
            yield
        except BaseException as error:
            # Bad input that shows when the model is loaded or the agent is started, and interrupts. Errors of engines
            # and workers are not among them: their messages name logs in this directory.
            is_bad_input = isinstance(error, (*_BAD_INPUT, RunDirectoryError)) or not isinstance(error, Exception)
            if is_bad_input and not _has_work(directory):
                if is_created:
                    _remove(path, except_for=foreign)
                    if former is not None:
                        former.rename(path)
                if lock is not None:
                    lock.is_removed = not is_network(filesystem_of(path.parent.resolve()))
            raise


def _remove(path: Path, *, except_for: frozenset[Path]) -> None:
    """Remove a run directory, but for what was in it before: its user may have put files there."""
    if not except_for:
        rmtree(path, ignore_errors=True)
        return
    for entry in set(path.iterdir()) - except_for:
        if entry.is_dir() and not entry.is_symlink():
            rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _has_work(directory: RunDirectory) -> bool:
    """Return whether a run has sampled or trained anything. It may have a record, a report and empty files before."""
    files = (directory.metrics, directory.failures, directory.sessions)
    directories = (directory.checkpoints, directory.weights, directory.adapter, directory.captures)
    dumps = (directory.rollouts, directory.eval_rollouts)
    try:
        if any(path.is_file() and path.stat().st_size > 0 for path in files):
            return True
        if any(path.is_dir() and any(path.iterdir()) for path in (*directories, *dumps)):
            return True
        # Turns of episodes that are not over, which a resumed run would not sample again.
        for path in (directory.journal, directory.groups):
            settle(path)
            if path.is_file():
                with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as journal:
                    if journal.execute("SELECT EXISTS (SELECT 1 FROM sessions)").fetchone() == (1,):
                        return True
    except (OSError, sqlite3.Error):
        return True
    return False


def _lock(directory: RunDirectory, stack: ExitStack, made: list[Path]) -> HeldLock | None:
    """Lock the directory until ``stack`` closes. A file system without locks costs a warning, not the run.

    Directories that are made for it are appended to ``made``.
    """
    try:
        for num_tries in count(1):
            try:
                for parent in reversed(directory.path.parents):
                    with suppress(FileExistsError):
                        if not parent.is_dir():
                            parent.mkdir()
                            made.append(parent)
                return stack.enter_context(hold(directory.lock))
            except FileNotFoundError:
                # Another start, which failed, has just removed the parent that it had made.
                if num_tries == _MAX_TRIES:
                    raise
    except LockHeld as held:
        raise ConfigError(
            f"{directory.path} is in use by {held.holder}, which runs there; end that run, or give this one another "
            "trial_name or --run-dir"
        ) from None
    except OSError as error:
        # A file system that cannot lock is not a directory in use.
        if error.errno not in NO_LOCKS:
            raise
        _log.warning("run_directory_not_locked", path=str(directory.path), reason=error.strerror)
    return None


@contextmanager
def _resumed_settings(config: RunConfig, directory: RunDirectory) -> Iterator[None]:
    """Save the settings of a resumed run, and those of the steps before as ``config.<n>.yaml`` if they differ.

    If the run has not begun when the block is left, its former settings are put back. Raises ``ConfigError`` if there
    is no run, or if its problems were drawn in another order.
    """
    if not directory.has_run:
        raise ConfigError(f"There is no run in {directory.path} to resume; leave --resume out, or check --run-dir.")
    _check_orders(config, directory)
    before = directory.config.read_text(encoding="utf-8") if directory.config.is_file() else None
    begun_at = _written_at(directory.metrics)
    directory.path.mkdir(parents=True, exist_ok=True)
    numbered = (directory.path / f"config.{number}.yaml" for number in count(1))
    earlier = next(path for path in numbered if not path.exists())
    if before is not None:
        # Before the new settings are written: a crash between the two writes must not lose the former ones.
        atomic_write(earlier, before, mode=0o600)
    save_config(config, directory.config)
    now = directory.config.read_text(encoding="utf-8")
    if before is None or before == now:
        earlier.unlink(missing_ok=True)
        yield
        return
    for change in find_changes(before, now):
        _log.warning("resumed_with_another_setting", setting=change)
    try:
        yield
    finally:
        # The first step of the resumed run writes metrics; without one, the new settings have had no effect.
        if _written_at(directory.metrics) == begun_at:
            earlier.replace(directory.config)


def _check_orders(config: RunConfig, directory: RunDirectory) -> None:
    """Raise ``ConfigError`` if the problems of a source were drawn in another order in the run to resume.

    Draws and solve rates are stored by the places of the problems in that order, in checkpoints and in the journal, and
    would go to other problems. Settings of earlier parts of the run count, too, if difficulty was not enabled since.
    """
    numbered = takewhile(Path.exists, (directory.path / f"config.{number}.yaml" for number in count(1)))
    stored: dict[str, str | None] = {}
    for path in (*numbered, *filter(Path.is_file, [directory.config])):
        with suppress(yaml.YAMLError, AttributeError):  # damaged, or not a mapping
            settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            common = settings.get("rollout", {}).get("difficulty", {})
            for name, source in (settings.get("sources") or {"": {}}).items():
                difficulty = source.get("difficulty") or common
                if difficulty.get("enabled"):
                    stored[name] = difficulty.get("order_by")
    for name in config.training_sets:
        difficulty = config.agents.get(name, config.rollout).difficulty
        if difficulty.enabled and stored.get(name, difficulty.order_by) != difficulty.order_by:
            setting = f"sources.{name}.difficulty.order_by" if name else "rollout.difficulty.order_by"
            raise ConfigError(
                f"{setting} is {difficulty.order_by or 'null'}, and the run to resume has drawn its problems with "
                f"{stored[name] or 'null'}: their solve rates would go to other problems. Resume with that setting, or "
                "begin another trial."
            )


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def find_changes(before: str, now: str) -> tuple[str, ...]:
    """Return the settings in which two configuration files differ, each as ``name: before -> now``, without secrets."""
    try:
        old, new = (_flatten(yaml.safe_load(redact_settings(text)) or {}) for text in (before, now))
    except (yaml.YAMLError, AttributeError):
        # A file that was damaged, or is not a mapping.
        return ("the settings of the steps before cannot be read",)
    return tuple(
        f"{name}: {old.get(name, 'not set')} -> {new.get(name, 'not set')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    )


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def require_packages(config: RunConfig) -> None:
    """Raise ``ConfigError`` if an optional package that the configuration needs is not installed."""
    require_trackers(list(config.logging.tracker_options))
    if config.logging.row_dumps.every_steps and not has_parquet():
        raise ConfigError(f"logging.row_dumps writes parquet, which needs pyarrow: {INSTALL_PARQUET}")


_EPISODE_BYTES = 4 * 1024
"""An episode with one short answer until it is trained: 4.5 kB were measured for its turn alone."""
_PROCESS_BYTES = 16 * 2**20
"""A process of Python that has imported little."""


def require_memory(config: RunConfig) -> None:
    """Raise ``ConfigError`` for numbers of episodes and processes that cannot fit into the memory of this machine.

    They are the least that the settings need, so that numbers are found that are off by orders of magnitude; ``doctor``
    predicts the memory of a job. Those of a cluster are not known here.
    """
    if config.scheduler.type is not SchedulerType.LOCAL:
        return
    memory_mib = find_machine().memory_mib
    if memory_mib is None:
        return
    largest = {name: rollout.group_size for name, rollout in config.agents.items()}
    wanted = [
        (
            f"sources.{name}.group_size" if name else "rollout.group_size",
            f"a step has batch_size {config.batch_size:,} groups of {size:,} episodes",
            config.batch_size * size * _EPISODE_BYTES,
        )
        for name, size in largest.items()
    ]
    num_samples, num_proxies = config.evaluation.num_samples, config.proxy.num_processes
    num_workers = config.rollout.openai.subproc_max_workers
    wanted += [
        (
            "evaluation.num_samples",
            f"an evaluation has {num_samples:,} episodes of each problem",
            num_samples * _EPISODE_BYTES,
        ),
        ("proxy.num_processes", f"a service has {num_proxies:,} processes", num_proxies * _PROCESS_BYTES),
        (
            "rollout.openai.subproc_max_workers",
            f"agents have {num_workers:,} processes",
            num_workers * _PROCESS_BYTES,
        ),
    ]
    excessive = tuple(
        f"{setting}: {reason}, which need at least {num_bytes / 1e9:,.0f} GB, more than this machine has"
        for setting, reason, num_bytes in wanted
        if num_bytes > memory_mib * 2**20
    )
    if excessive:
        raise ConfigError(excessive)


def advise(config: RunConfig, *, is_service: bool) -> list[str]:
    """Return a sentence for each setting that has no effect, or that is likely to be a mistake."""
    has_servers = config.rollout.backend is not Backend.TORCH
    training = (*inert_settings(config.trainer, has_servers=has_servers), *doubtful_settings(config.trainer))
    return [
        *(f"trainer.{sentence}" for sentence in training),
        *(
            f"{name} has no effect: phases is [{', '.join(config.phases)}]."
            for name in (PhaseName.SFT, PhaseName.DISTILLATION)
            if getattr(config, name) is not None and name not in config.phases
        ),
        *_inert_persistence(config, is_service=is_service),
    ]


def _inert_persistence(config: RunConfig, *, is_service: bool) -> Iterator[str]:
    """Yield a sentence for each setting that has no effect on what a restart restores."""
    journal, default = config.journal, JournalConfig()
    changed = [name for name in ("path", "sync", "retention_days") if getattr(journal, name) != getattr(default, name)]
    if not journal.enabled:
        yield from (f"journal.{name} has no effect: journal.enabled is false." for name in changed)
    elif not is_service:
        where = "groups.sqlite in the run directory, from which trained groups are deleted"
        yield from (
            f"journal.{name} has no effect: it is of a service, and a run over a dataset has {where}."
            for name in changed
            if name != "sync"
        )
    if config.rollout.resume is not ResumeEpisodes.REPLAY:
        if is_service:
            yield "rollout.resume has no effect: the agents of a service are resumed with their sessions."
        elif not journal.enabled:
            yield "rollout.resume has no effect: journal.enabled is false, and every episode starts from its beginning."


def log_advice(config: RunConfig, *, is_service: bool) -> None:
    """Log a warning for each setting that has no effect, or that is likely to be a mistake."""
    for sentence in advise(config, is_service=is_service):
        _log.warning("setting", detail=sentence)


def warn_of_length(config: RunConfig, context_length: int) -> None:
    """Log a warning if ``engine.max_length`` was set to more than the engine's ``context_length``."""
    wanted = config.engine.max_length
    # The default suits most models, and was not chosen by the user.
    if config.rollout.backend is Backend.TORCH and context_length < wanted != TorchEngineConfig().max_length:
        limit = f"the model has {context_length:,} positions, which limit prompt plus answer"
        _log.warning("setting", detail=f"engine.max_length is {wanted:,}, and {limit}.")


def warn_of_singletons(config: RunConfig, sizes: Mapping[str, int]) -> None:
    """Log a warning if groups have one episode, and advantages compare it with others. ``sizes`` are by setting."""
    if PhaseName.RL not in config.phases or not compares_members(config.trainer.advantages):
        return
    for setting in (setting for setting, size in sizes.items() if size == 1):
        _log.warning(
            "advantages_will_be_zero",
            reason=f"{setting} is 1, and {config.trainer.advantages.normalisation} compares episodes of one group",
            hint=f"set trainer.advantages.normalisation to reinforce_plus_plus, or {setting} to 2 or more",
        )


_SAMPLING = (
    *("seed", "batch_size", "model", "tokenizer", "dataset", "sources", "rollout", "gconfig", "renderer"),
    *("phases", "distillation"),
)
"""The settings that decide how groups are sampled, and how many of them a step trains."""


def sampling_digest(path: Path) -> str:
    """Return a digest of the settings in ``path`` that groups are sampled with. Blocks."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    chosen = {name: settings.get(name) for name in _SAMPLING}
    if isinstance(chosen["rollout"], dict):
        # Groups are sampled in the same way however the run is resumed.
        chosen["rollout"] = {name: value for name, value in chosen["rollout"].items() if name != "resume"}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode()).hexdigest()


def no_checkpoint(directory: RunDirectory) -> CheckpointError:
    """Return the error for a run without a checkpoint. It names the run that was moved aside, if that has one."""
    former = directory.former
    has_one = former is not None and any(former.checkpoints.glob("step-*"))
    advice = f"--run-dir {former.path} goes on with the run before" if former and has_one else "leave --resume out"
    return CheckpointError(f"There is no complete checkpoint in {directory.checkpoints} to go on from; {advice}.")


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


def load_rendering(config: RunConfig) -> TemplateRenderer:
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
    found = {}
    for name, one in config.training_sets.items():
        found[name] = load_set(config, one, name=name)
        difficulty = config.agents.get(name, config.rollout).difficulty
        if difficulty.order_by is not None:
            with _naming(f"sources.{name}" if name else "rollout", source=name):
                found[name] = found[name].ordered_by(difficulty.order_by)
    return found


def load_problem_sets(config: RunConfig, *, is_external: bool) -> ProblemSets:
    """Load the datasets. If ``is_external``, only the held-out ones, since agents bring the problems to train on."""
    problems = (None if is_external else load_training_problems(config)) or None
    held_out = load_held_out(config)
    for name, found in held_out.items():
        num_shared = 0 if problems is None else find_overlap(found, *problems.values())
        if num_shared:
            named = {"set": name} if name else {}
            _log.warning("held_out_problems_are_trained_on", shared=num_shared, held_out=len(found), **named)
    return ProblemSets(train=problems, held_out=held_out)


def create_policy(config: RunConfig, model: ModelFiles, *, is_first: bool = True) -> PolicyTrainer:
    """Create the initial policy. Every process that trains it calls this function.

    A single process trains on ``trainer.device``. In a gang, weights stay in their files until the gang forms, when
    each rank reads its part. Those of a model that is not in safetensors are loaded by the first rank (``is_first``),
    which sends the others their parts. Raises ``ConfigError`` for a device that is not available, and ``ModelError``
    for files that are incomplete or do not fit.
    """
    from areal_actors.training.trainer import PolicyTrainer

    # The reference of an adapter is the same model without it.
    needs_reference = config.trainer.objective.kl.coefficient > 0 and config.trainer.lora is None
    load = load_policy if config.trainer.gang.num_processes == 1 else partial(open_policy, is_first=is_first)
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


def open_policy(path: Path, *, is_first: bool = True) -> Any:
    """Return the model at ``path`` without its weights where they can be read in parts (``training.loading``).

    Otherwise the first rank of a gang loads them, and the others leave them out. Raises ``ModelError`` for files that
    are incomplete or do not fit.
    """
    from areal_actors.lib.checkpoint_tensors import StoredModel
    from areal_actors.training.loading import attach_source

    if not any(path.glob("*.safetensors")):
        return load_policy(path) if is_first else create_empty_policy(path)
    model = create_empty_policy(path)
    attach_source(model, StoredModel(path, model))
    return model


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
