"""Checks of this machine for a job: packages, model, problems, agent, directories, port and device."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from areal_actors import __version__
from areal_actors.config import RunConfig
from areal_actors.datasets import find_overlap
from areal_actors.domain import Role
from areal_actors.generation.servers.config import Backend
from areal_actors.journal.sqlite import filesystem_of, is_network
from areal_actors.lib.process_limits import open_files_limit
from areal_actors.models import ModelFiles, resolve_model, resolve_tokenizer
from areal_actors.proxy.access import create_admin_key
from areal_actors.proxy.server import bind
from areal_actors.run.advice import advise
from areal_actors.run.checks import try_functions
from areal_actors.run.directory import require_packages
from areal_actors.run.doctor.findings import Examination, Finding, Verdict
from areal_actors.run.job import load_set, load_training_problems, local_teacher, prepare_agents
from areal_actors.sandbox import create_sandbox
from areal_actors.training.config import Activations, GangBackend, LoraConfig, OffloadTo, OptimizerName
from areal_actors.workflows import CommandConfig, PluginWorkflow

_PACKAGES = ("torch", "transformers", "anyio", "starlette", "uvicorn", "hypercorn")
_OPTIMIZER_BYTES_PER_WEIGHT_BYTE = 3
"""A checkpoint holds the weights, and two moments of each."""
_OWN_FILES = 256
_FILES_PER_EPISODE = 4
"""An agent's connections, those to an inference server and to a child process that runs the agent."""

_TIGHT = 0.85
"""Share of the device above which a prediction that is 15 % too low would not fit."""
_GB = 10**9
_BASE_BYTES = _GB
"""Python, torch and its libraries, in the memory of the host."""


def examine_machine(config: RunConfig) -> Iterator[Finding]:
    """Check everything that can be seen on this machine. Blocks; creates a built-in model that is not cached yet."""
    yield from _examine_inputs(config)
    yield from _examine_agent(config)
    yield from _examine_disk(config)
    yield from _examine_limits(config)
    with Examination("memory") as found:
        found.findings.extend(examine_memory(config))
    yield from found.findings


def _examine_inputs(config: RunConfig) -> Iterator[Finding]:
    """Check packages, model and problems."""
    with Examination("packages") as found:
        require_packages(config)
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
        found.add(Verdict.OK, f"areal_actors {__version__}, Python {platform.python_version()}, {versions}")
    yield from found.findings
    with Examination("model") as found:
        model = resolve_model(config.model, has_tokenizer=config.tokenizer is None)
        if config.tokenizer is not None:
            resolve_tokenizer(config.tokenizer)
        found.add(Verdict.OK, f"{config.model} in {model.path}, {_format_size(_weight_bytes(model))}")
    yield from found.findings
    with Examination("problems") as found:
        problems = load_training_problems(config)
        if not problems:
            found.add(Verdict.SKIPPED, "none are named: external agents bring theirs")
        else:
            places = ", ".join(source.source for source in config.training_sets.values())
            found.add(Verdict.OK, f"{sum(map(len, problems.values()))} from {places}")
            for name, dataset in config.held_out_sets.items():
                held_out = load_set(config, dataset, name=name, is_held_out=True)
                shared = find_overlap(held_out, *problems.values())
                setting = f"eval_datasets.{name}" if name else "eval_dataset"
                found.add(
                    Verdict.WARNING if shared else Verdict.OK,
                    f"{len(held_out)} from {dataset.source}; {shared} of them are trained on",
                    f"Give dataset and {setting} different files, ranges or seeds." if shared else "",
                    check=f"held-out problems {name}".rstrip(),
                )
    yield from found.findings


def _examine_agent(config: RunConfig) -> Iterator[Finding]:
    """Check the agent with its sandbox, custom functions, and settings that are likely to be mistakes."""
    sandboxes = {rollout.openai.sandbox for rollout in config.agents.values()}
    with Examination("agent") as found:
        with tempfile.TemporaryDirectory() as logs:
            prepare_agents(config, logs=Path(logs))
        for source, rollout in config.agents.items():
            agent = rollout.workflow
            if agent is None:
                found.add(Verdict.SKIPPED, "none is named: agents run elsewhere")
                continue
            match agent:
                case CommandConfig():
                    name = " ".join(agent.command)
                case PluginWorkflow():
                    name = agent.plugin.describe()
                case _:
                    name = agent
            found.add(Verdict.OK, f"{name} can be run", check=f"agent {source}".rstrip())
    yield from found.findings
    with Examination("sandbox") as found:
        for sandbox in sandboxes:
            if sandbox.is_isolated:
                found.add(Verdict.OK, f"{create_sandbox(sandbox.backend).check(sandbox)} opens a sandbox")
    yield from found.findings
    with Examination("functions") as found:
        for tried in try_functions(config):
            found.add(Verdict.OK, f"{tried.setting}: {tried.reference} {tried.detail}")
    yield from found.findings
    with Examination("settings") as found:
        for sentence in advise(config, is_service=not config.has_rollouts):
            found.add(Verdict.WARNING, sentence)
        if not found.findings:
            found.add(Verdict.OK, "all settings of the trainer and the journal have an effect")
    yield from found.findings


def _examine_disk(config: RunConfig) -> Iterator[Finding]:
    """Check the run directory and the file system of the journal."""
    with Examination("run directory") as found:
        path = config.run_directory.path
        parent = next(each for each in (path, *path.parents) if each.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            found.add(Verdict.FAILED, f"{parent} is not writable", "Set fileroot to a directory of yours.")
        else:
            weights = _weight_bytes(resolve_model(config.model, has_tokenizer=config.tokenizer is None))
            # The exported weights, the checkpoints that are kept, and the one that is being written.
            needed = weights * (1 + _OPTIMIZER_BYTES_PER_WEIGHT_BYTE * (config.checkpoint.keep + 1))
            free = shutil.disk_usage(parent).free
            room = f"{_format_size(free)} free, checkpoints take {_format_size(needed)}"
            advice = "Free some space, lower checkpoint.keep, or set fileroot to another disk."
            is_enough = free > needed
            verdict = Verdict.OK if is_enough else Verdict.FAILED
            found.add(verdict, f"{path} can be written; {room}", "" if is_enough else advice)
    yield from found.findings
    with Examination("journal") as found:
        path = (config.journal.path or config.run_directory.path).absolute()
        filesystem = filesystem_of(path)
        if is_network(filesystem) and config.journal.enabled:
            advice = "To serve external agents, set journal.path to a file on a local disk; train uses no such file."
            found.add(Verdict.WARNING, f"{path} would lie on {filesystem}, which several machines may mount", advice)
        else:
            found.add(Verdict.OK, f"on {filesystem or 'an unknown filesystem'}")
    yield from found.findings


def _examine_limits(config: RunConfig) -> Iterator[Finding]:
    """Check the port of the proxy, the limit of open files, and the device of the engine."""
    with Examination("port") as found:
        proxy = config.proxy
        if config.scheduler.roles.placed and proxy.admin_key is None:
            proxy = evolve(proxy, admin_key=create_admin_key())  # as such a run does
        bind(proxy).close()
        found.add(Verdict.OK, f"the proxy can listen at {proxy.host}, {proxy.port or 'any free port'}")
    yield from found.findings
    with Examination("open files") as found:
        limit, rollout = open_files_limit(), config.rollout
        size = max(agent.group_size for agent in config.agents.values())
        needed = _OWN_FILES + _FILES_PER_EPISODE * rollout.max_concurrent_rollouts * size
        allowed = "any number may be open" if limit is None else f"{limit:,} files and connections may be open at once"
        if limit is None or limit >= needed:
            found.add(Verdict.OK, allowed)
        else:
            advice = "Raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or lower "
            advice += "rollout.max_concurrent_rollouts."
            found.add(Verdict.WARNING, f"{allowed}, and this job may want {needed:,}", advice)
    yield from found.findings
    with Examination("device") as found:
        import torch

        num_gpus = torch.cuda.device_count()
        if config.engine.device.startswith("cuda") and not num_gpus:
            found.add(
                Verdict.FAILED,
                f"engine.device is {config.engine.device}, and torch {torch.__version__} sees no GPU",
                "Set engine.device=cpu, or install a torch that was built for this machine's driver.",
            )
        else:
            # The CPUs of this process, which a job or a container may have fewer of than the machine.
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            names = ", ".join(torch.cuda.get_device_name(index) for index in range(num_gpus))
            found.add(Verdict.OK, names or f"no GPU; {cpus} CPUs")
    yield from found.findings


def _weight_bytes(model: ModelFiles) -> int:
    return sum(file.stat().st_size for file in model.path.glob("*.safetensors"))


def _format_size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:  # noqa: PLR2004 - SI
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


# ------------------------------------------------------------------------------------------------------- memory


def examine_memory(config: RunConfig) -> Iterator[Finding]:
    """Predict the peak of trainer and embedded engine, and compare it with the memory of this machine's device.

    A trainer or an engine that runs elsewhere is reported without a verdict: its device is not known here.
    """
    import torch
    from transformers import AutoConfig

    from areal_actors.training.memory import device_bytes, sketch_model

    path = resolve_model(config.model, has_tokenizer=config.tokenizer is None).path
    try:
        model = sketch_model(AutoConfig.from_pretrained(path, local_files_only=True))
    except ValueError as error:
        # transformers does not know the architecture, which the check of the model reports.
        yield Finding(check="memory", verdict=Verdict.SKIPPED, detail=str(error).splitlines()[0])
        return
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    memory = {name: device_bytes(torch.device(name)) for name in devices}
    teacher = None
    if (name := local_teacher(config)) is not None:
        teacher_path = resolve_model(name, has_tokenizer=False).path
        teacher = sketch_model(AutoConfig.from_pretrained(teacher_path, local_files_only=True))
    models = _Models(policy=model, teacher=teacher)
    parts = _predict(config, models, memory)
    for device, available in memory.items():
        own = [part for part in parts if part.device == device and part.is_here]
        if not own:
            continue
        here = sum(part.num_bytes for part in own) + (_BASE_BYTES if device == "cpu" else 0)
        detail = "; ".join(part.text for part in own)
        place, is_enough = "this GPU" if device == "cuda" else "this machine", here <= _TIGHT * available
        yield Finding(
            check="memory",
            verdict=Verdict.OK if is_enough else Verdict.WARNING if here <= available else Verdict.FAILED,
            detail=f"{_format_size(here)} predicted, of {_format_size(available)} of {place}: {detail}",
            advice="" if is_enough else _advise(config, models, memory, device),
        )
    if elsewhere := [part.text for part in parts if not part.is_here]:
        yield Finding(check="memory", verdict=Verdict.OK, detail=f"predicted elsewhere: {'; '.join(elsewhere)}")


@frozen(kw_only=True)
class _Models:
    """The models of a run as shapes without numbers; ``teacher`` only if the trainer loads one."""

    policy: Any
    teacher: Any | None


@frozen(kw_only=True)
class _Part:
    """A part of a run: its description, its bytes, its device, and whether it runs on this machine."""

    text: str
    num_bytes: int
    device: str
    is_here: bool


def _predict(config: RunConfig, models: _Models, memory: Mapping[str, int]) -> list[_Part]:
    """Return the parts of trainer and embedded engine. ``memory`` is that of the devices of this machine, by type.

    A device that this machine does not have is that of another machine.
    """
    from areal_actors.generation.torch.engine import plan_engine
    from areal_actors.training.memory import plan_trainer

    placed = config.scheduler.roles.placed
    is_embedded = config.rollout.backend is Backend.TORCH
    first = next(iter(memory))  # the GPU, if there is one
    trainer_device, engine_device = (
        first if asked == "auto" else asked.partition(":")[0] for asked in (config.trainer.device, config.engine.device)
    )
    gang = config.trainer.gang
    if gang.num_processes > 1:  # whose backend decides
        trainer_device = "cpu" if gang.backend is GangBackend.GLOO else first
    found, engine_bytes = [], 0
    if is_embedded:
        engine = plan_engine(models.policy, config.engine, device_type=engine_device)
        split = f"weights {_format_size(engine.weights)}, keys and values up to {_format_size(engine.cache)}"
        is_here = Role.GENERATION not in placed and engine_device in memory
        engine_bytes = engine.total if is_here and engine_device == trainer_device else 0
        found.append(
            _Part(
                text=f"engine {_format_size(engine.total)} ({split})",
                num_bytes=engine.total,
                device=engine_device,
                is_here=is_here,
            )
        )
    trainer = plan_trainer(
        models.policy,
        config.trainer,
        device_type=trainer_device,
        memory_bytes=memory.get(trainer_device, memory[first]),
        teacher=models.teacher,
        other_bytes=engine_bytes,
        # The limit of a server is not known here, nor to the trainer.
        max_length=config.engine.max_length if is_embedded else 0,
    )
    names = ", ".join(f"{name} {_format_size(value)}" for name, value in trainer.parts().items() if value)
    ranks = config.trainer.gang.num_processes
    each = f" for each of {ranks} processes" if ranks > 1 else ""
    kept = str(trainer.kept)
    if trainer.num_kept_layers:
        kept += f", and kept by {trainer.num_kept_layers} layers if {_format_size(trainer.kept_layer_bytes)} are free"
    own = _Part(
        text=f"trainer {_format_size(trainer.total)}{each} ({names}; activations {kept})",
        num_bytes=trainer.total * (ranks if trainer_device == "cpu" else 1),
        device=trainer_device,
        is_here=Role.TRAINER not in placed and trainer_device in memory,
    )
    return [own, *found]


def _advise(config: RunConfig, models: _Models, memory: Mapping[str, int], device: str) -> str:
    """Return the settings that need less memory of ``device``, with the bytes that each would save, largest first."""

    def count(changed: RunConfig) -> int:
        parts = _predict(changed, models, memory)
        return sum(part.num_bytes for part in parts if part.is_here and part.device == device)

    here = count(config)
    trainer = config.trainer
    fewer = max(config.engine.max_concurrent // 4, 1)
    low_bit = evolve(trainer.optimizer, name=OptimizerName.ADAMW_8BIT, offload=OffloadTo.NONE)
    options: dict[str, RunConfig] = {
        "trainer.lora.rank=16": evolve(config, trainer=evolve(trainer, lora=trainer.lora or LoraConfig())),
        "trainer.activations=recompute": evolve(config, trainer=evolve(trainer, activations=Activations.RECOMPUTE)),
        "trainer.chunk_tokens=1024": evolve(config, trainer=evolve(trainer, chunk_tokens=1024)),
        f"engine.max_concurrent={fewer}": evolve(config, engine=evolve(config.engine, max_concurrent=fewer)),
    }
    if trainer.gang.num_processes == 1:
        options["trainer.optimizer.name=adamw_8bit"] = evolve(config, trainer=evolve(trainer, optimizer=low_bit))
    saved = {name: here - count(changed) for name, changed in options.items()}
    # A hundredth of what is needed is less than the error of the prediction.
    best = sorted((item for item in saved.items() if item[1] > here / 100), key=lambda item: -item[1])
    if not best:
        return "No setting saves much here; take a smaller model, or a device with more memory."
    return "Each of these needs less: " + ", ".join(f"{name} (-{_format_size(value)})" for name, value in best) + "."
