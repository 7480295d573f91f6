"""Checks of this machine for a job: packages, model, problems, agent, directories, port and device."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from attrs import evolve

from areal_actors import __version__
from areal_actors.config import RunConfig
from areal_actors.datasets import DatasetConfig, find_overlap, load_problems
from areal_actors.generation.servers.config import Backend
from areal_actors.journal.sqlite import filesystem_of, is_network
from areal_actors.lib.open_files import open_files_limit
from areal_actors.lib.references import import_reference
from areal_actors.models import ModelFiles, resolve_model, resolve_tokenizer
from areal_actors.proxy.access import create_admin_key
from areal_actors.proxy.server import bind
from areal_actors.run.checks import try_functions
from areal_actors.run.doctor.findings import Finding, Verdict, examined
from areal_actors.run.doctor.memory import examine_memory
from areal_actors.run.job import prepare_agent, require_packages
from areal_actors.sandbox import SandboxKind, create_sandbox
from areal_actors.training.advice import doubtful_settings, inert_settings
from areal_actors.workflows import CommandConfig

__all__ = ["examine_machine"]

_PACKAGES = ("torch", "transformers", "anyio", "starlette", "hypercorn")
_OPTIMIZER_BYTES_PER_WEIGHT_BYTE = 3
"""A checkpoint holds the weights, and two moments of each."""
_OWN_FILES = 256
_FILES_PER_EPISODE = 4
"""An agent's connections, those to an inference server and to a child process that runs the agent."""


def examine_machine(config: RunConfig) -> Iterator[Finding]:
    """Look at everything that can be seen from here. Blocks; makes a built-in model that was not made yet."""
    yield from examined("packages", lambda: _packages(config))
    yield from examined("model", lambda: _model(config))
    yield from examined("problems", lambda: _problems(config))
    yield from examined("agent", lambda: _agent(config))
    yield from examined("sandbox", lambda: _sandbox(config))
    yield from examined("functions", lambda: _functions(config))
    yield from examined("settings", lambda: _settings(config))
    yield from examined("run directory", lambda: _run_directory(config))
    yield from examined("journal", lambda: _journal(config))
    yield from examined("port", lambda: _port(config))
    yield from examined("open files", lambda: _open_files(config))
    yield from examined("device", lambda: _device(config))
    yield from examined("memory", lambda: examine_memory(config))


def _packages(config: RunConfig) -> Iterator[Finding]:
    require_packages(config)
    found = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    detail = f"areal_actors {__version__}, Python {platform.python_version()}, {found}"
    yield Finding(check="packages", verdict=Verdict.OK, detail=detail)


def _model(config: RunConfig) -> Iterator[Finding]:
    model = resolve_model(config.model, has_tokenizer=config.tokenizer is None)
    if config.tokenizer is not None:
        resolve_tokenizer(config.tokenizer)
    detail = f"{config.model} in {model.path}, {_size(_weight_bytes(model))}"
    yield Finding(check="model", verdict=Verdict.OK, detail=detail)


def _problems(config: RunConfig) -> Iterator[Finding]:
    if config.dataset is None:
        yield Finding(check="problems", verdict=Verdict.SKIPPED, detail="none are named: external agents bring theirs")
        return
    seed = config.seed
    problems = load_problems(config.dataset, import_reference=import_reference, shuffle_seed=seed)
    detail = f"{len(problems)} from {_source(config.dataset)}"
    yield Finding(check="problems", verdict=Verdict.OK, detail=detail)
    for name, dataset in config.held_out_sets.items():
        held_out = load_problems(dataset, import_reference=import_reference)
        shared = find_overlap(problems, held_out)
        setting = f"eval_datasets.{name}" if name else "eval_dataset"
        yield Finding(
            check=f"held-out problems {name}".rstrip(),
            verdict=Verdict.WARNING if shared else Verdict.OK,
            detail=f"{len(held_out)} from {_source(dataset)}; {shared} of them are trained on",
            advice=f"Give dataset and {setting} different files, ranges or seeds." if shared else "",
        )


def _source(dataset: DatasetConfig) -> str:
    return str(dataset.jsonl or dataset.huggingface or dataset.reasoning_gym or dataset.python)


def _agent(config: RunConfig) -> Iterator[Finding]:
    if config.rollout.workflow is None:
        yield Finding(check="agent", verdict=Verdict.SKIPPED, detail="none is named: agents run elsewhere")
        return
    with tempfile.TemporaryDirectory() as logs:
        prepare_agent(config.rollout, logs=Path(logs))
    agent = config.rollout.workflow
    name = " ".join(agent.command) if isinstance(agent, CommandConfig) else agent
    yield Finding(check="agent", verdict=Verdict.OK, detail=f"{name} can be run")


def _sandbox(config: RunConfig) -> Iterator[Finding]:
    sandbox = config.rollout.openai.sandbox
    if sandbox.backend is not SandboxKind.NONE:
        found = create_sandbox(sandbox.backend).check(sandbox)
        yield Finding(check="sandbox", verdict=Verdict.OK, detail=f"{found} opens a sandbox")


def _functions(config: RunConfig) -> Iterator[Finding]:
    for found in try_functions(config):
        detail = f"{found.setting}: {found.reference} {found.detail}"
        yield Finding(check="functions", verdict=Verdict.OK, detail=detail)


def _settings(config: RunConfig) -> Iterator[Finding]:
    inert = inert_settings(config.trainer, has_servers=config.rollout.backend is not Backend.TORCH)
    doubtful = doubtful_settings(config.trainer)
    for sentence in (*inert, *doubtful):
        yield Finding(check="settings", verdict=Verdict.WARNING, detail=f"trainer.{sentence}")
    if not inert and not doubtful:
        yield Finding(check="settings", verdict=Verdict.OK, detail="all settings of the trainer have an effect")


def _run_directory(config: RunConfig) -> Iterator[Finding]:
    path = config.run_directory.path
    parent = next(each for each in (path, *path.parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        advice = "Set fileroot to a directory of yours."
        yield Finding(check="run directory", verdict=Verdict.FAILED, detail=f"{parent} is not writable", advice=advice)
        return
    free, needed = shutil.disk_usage(parent).free, _needed_bytes(config)
    is_enough = free > needed
    yield Finding(
        check="run directory",
        verdict=Verdict.OK if is_enough else Verdict.FAILED,
        detail=f"{path} can be written; {_size(free)} free, checkpoints take {_size(needed)}",
        advice="" if is_enough else "Free some space, lower checkpoint.keep, or set fileroot to another disk.",
    )


def _needed_bytes(config: RunConfig) -> int:
    """The checkpoints that are kept, the one that is being written, and the exported weights."""
    weights = _weight_bytes(resolve_model(config.model, has_tokenizer=config.tokenizer is None))
    return weights * (1 + _OPTIMIZER_BYTES_PER_WEIGHT_BYTE * (config.checkpoint.keep + 1))


def _weight_bytes(model: ModelFiles) -> int:
    return sum(file.stat().st_size for file in model.path.glob("*.safetensors"))


def _journal(config: RunConfig) -> Iterator[Finding]:
    path = (config.journal.path or config.run_directory.path).absolute()
    filesystem = filesystem_of(path)
    is_shared = is_network(filesystem) and config.journal.enabled
    if is_shared and not config.journal.allow_shared:
        advice = "To serve external agents, set journal.path to a file on a local disk; train needs no journal."
        detail = f"{path} would lie on {filesystem}, which several machines may mount"
        yield Finding(check="journal", verdict=Verdict.WARNING, detail=detail, advice=advice)
    else:
        detail = f"on {filesystem or 'an unknown filesystem'}"
        yield Finding(check="journal", verdict=Verdict.OK, detail=detail)


def _port(config: RunConfig) -> Iterator[Finding]:
    proxy = config.proxy
    if config.scheduler.roles.placed and proxy.admin_key is None:
        proxy = evolve(proxy, admin_key=create_admin_key())  # as such a run does
    bind(proxy).close()
    port = config.proxy.port or "any free port"
    yield Finding(check="port", verdict=Verdict.OK, detail=f"the proxy can listen at {config.proxy.host}, {port}")


def _open_files(config: RunConfig) -> Iterator[Finding]:
    limit, needed = open_files_limit(), _needed_files(config)
    if limit is None or limit >= needed:
        detail = "any number may be open" if limit is None else f"{limit:,} files and connections may be open at once"
        yield Finding(check="open files", verdict=Verdict.OK, detail=detail)
        return
    yield Finding(
        check="open files",
        verdict=Verdict.WARNING,
        detail=f"{limit:,} files and connections may be open at once, and this job may want {needed:,}",
        advice="Raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or lower rollout.max_concurrent_rollouts.",
    )


def _needed_files(config: RunConfig) -> int:
    """Return the number of open files that a run needs: those of the process, and the connections of each episode."""
    episodes = config.rollout.max_concurrent_rollouts * config.rollout.group_size
    return _OWN_FILES + _FILES_PER_EPISODE * episodes


def _device(config: RunConfig) -> Iterator[Finding]:
    import torch

    num_gpus = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(num_gpus))
    if config.engine.device.startswith("cuda") and not num_gpus:
        detail = f"engine.device is {config.engine.device}, and torch {torch.__version__} sees no GPU"
        advice = "Set engine.device=cpu, or install a torch that was built for this machine's driver."
        yield Finding(check="device", verdict=Verdict.FAILED, detail=detail, advice=advice)
        return
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(check="device", verdict=Verdict.OK, detail=names or f"no GPU; {cpus} CPUs")


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:  # noqa: PLR2004 - SI
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
