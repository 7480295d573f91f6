"""``areal-actors doctor``: check whether a job can run, before it waits in a queue.

``_CHECKS`` is the list of all checks. Each is a function that yields findings about a configuration; an error that it
raises is a finding, too, so that the checks after it still run.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import click
from attrs import asdict, evolve, frozen

from areal_actors import __version__
from areal_actors.config import RunConfig
from areal_actors.datasets import DatasetConfig, Problems, find_overlap, find_shortage
from areal_actors.domain import Role
from areal_actors.errors import ArealError, EngineError, SchedulerError
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.dialect import ServerFacts
from areal_actors.generation.servers.http import create_client, parse_version
from areal_actors.generation.servers.launching import PYTHON_VARIABLES, choose_ports, find_kind
from areal_actors.generation.servers.server import read_key
from areal_actors.journal.sqlite import filesystem_of, is_network
from areal_actors.kernel.remote import listen
from areal_actors.kernel.remote.sockets import is_loopback, parse_address
from areal_actors.lib.process_limits import open_files_limit
from areal_actors.models import resolve_model, resolve_tokenizer
from areal_actors.proxy.access import create_admin_key
from areal_actors.proxy.server import bind
from areal_actors.run.advice import advise, find_singletons, size_setting
from areal_actors.run.checks import require_context, try_functions
from areal_actors.run.control_plane import controller_address
from areal_actors.run.directory import require_packages
from areal_actors.run.job import load_rendering, load_set, load_training_problems, prepare_agents
from areal_actors.run.memory_prediction import BASE_BYTES, format_size, predict_memory
from areal_actors.run.supervise import worker_spec
from areal_actors.sandbox import create_sandbox
from areal_actors.schedulers.accounting import Inventory, find_machine
from areal_actors.schedulers.base import ControllerAddress, PlacementStatus
from areal_actors.schedulers.config import SchedulerType
from areal_actors.schedulers.slurm import SlurmCommands, SlurmScheduler
from areal_actors.schedulers.slurm.script import JobRequest, create_arguments, render_script
from areal_actors.workflows import CommandConfig, PluginWorkflow, proxy_variables

_PACKAGES = ("torch", "transformers", "anyio", "starlette", "uvicorn", "hypercorn")
_OPTIMIZER_BYTES_PER_WEIGHT_BYTE = 3
"""A checkpoint holds the weights, and two moments of each."""
_OWN_FILES = 256
_FILES_PER_EPISODE = 4
"""An agent's connections, those to an inference server and to a child process that runs the agent."""
_TIGHT = 0.85
"""Share of the device above which a prediction that is 15 % too low would not fit."""
_LESS_MEMORY = (
    "Each of these needs less: a lower engine.max_concurrent, trainer.activations=recompute, "
    "trainer.lora.rank=16, trainer.optimizer.name=adamw_bf16."
)
_ASK_SECONDS = 15.0
_IMPORT_SECONDS = 180.0
"""A server's package takes long to import, on a cold disk even longer."""
_IMPORT = (
    "import importlib, sys; m = importlib.import_module(sys.argv[1]); print(); print(getattr(m, '__version__', ''))"
)
_HARMLESS = "platform"
"""The Python module that a trial job runs when it has started. It prints one line."""


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """The job can run, but may not do what its author expects."""
    FAILED = "failed"
    """The job cannot run with these settings."""
    SKIPPED = "skipped"
    """The check was not possible, or not requested."""


@frozen
class Finding:
    """The result of one check. ``advice`` says what to do about a problem; ``check`` is set by ``examine``."""

    verdict: Verdict
    detail: str
    advice: str = ""
    check: str = ""

    def to_json(self) -> str:
        """Return the finding as one line of JSON."""
        return json.dumps(asdict(self))


Check = Callable[[RunConfig], Iterator[Finding]]

_COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red", Verdict.SKIPPED: "bright_black"}


def format_finding(finding: Finding) -> str:
    """Return the finding as a line of text, followed by a line with the advice."""
    verdict = click.style(f"{finding.verdict:<8}", fg=_COLOURS[finding.verdict])
    lines = [*finding.detail.splitlines(), *([f"-> {finding.advice}"] if finding.advice else [])]
    return f"{verdict} {finding.check:<21}" + f"\n{'':<9}{'':<21}".join(lines)


def examine(config: RunConfig, *, has_trial: bool = False) -> Iterator[Finding]:
    """Check everything that the run of ``config`` needs, and yield each finding when it is known. Blocks.

    With ``has_trial``, a job of each role is submitted to the cluster and awaited: it starts the interpreter of the
    role on a node, writes to the run directory, and reaches the controller.
    """
    failed: dict[str, str] = {}
    for name, check in _CHECKS.items():
        for finding in _run(name, check(config)):
            # Several checks load the model, and fail in the same words if it cannot be read.
            cause = failed.setdefault(finding.detail, name) if finding.verdict is Verdict.FAILED else name
            yield finding if cause == name else evolve(finding, verdict=Verdict.SKIPPED, detail=f"see {cause}")
    if config.scheduler.type is SchedulerType.SLURM and config.scheduler.roles.placed:
        yield from _examine_cluster(config, has_trial=has_trial)


def _run(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of the check ``name``, of which an error is the last one."""
    try:
        for found in findings:
            yield evolve(found, check=found.check or name)
    except ArealError as error:
        yield Finding(Verdict.FAILED, str(error), check=name)
    except (OSError, ImportError) as error:
        # Its message needs the name of the class to be understood.
        yield Finding(Verdict.FAILED, f"{type(error).__name__}: {error}", check=name)


# ---------------------------------------------------------------------------------------- what the run is made of


def _check_packages(config: RunConfig) -> Iterator[Finding]:
    require_packages(config)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    yield Finding(Verdict.OK, f"areal_actors {__version__}, Python {platform.python_version()}, {versions}")


def _check_model(config: RunConfig) -> Iterator[Finding]:
    model = resolve_model(config.model, has_tokenizer=config.tokenizer is None)
    if config.tokenizer is not None:
        resolve_tokenizer(config.tokenizer)
    require_context(load_rendering(config), config.engine.max_length)
    yield Finding(Verdict.OK, f"{config.model} in {model.path}, {format_size(_weight_bytes(config))}")


def _check_problems(config: RunConfig) -> Iterator[Finding]:
    problems = load_training_problems(config)
    if not problems:
        yield Finding(Verdict.SKIPPED, "none are named: external agents bring theirs")
        return
    places = ", ".join(source.source for source in config.training_sets.values())
    yield Finding(Verdict.OK, f"{sum(map(len, problems.values()))} from {places}")
    for name, source in config.training_sets.items():
        yield from _warn_of_shortage(source, problems[name])
    for name, dataset in config.held_out_sets.items():
        held_out = load_set(config, dataset, name=name, is_held_out=True)
        shared = find_overlap(held_out, *problems.values())
        setting = f"eval_datasets.{name}" if name else "eval_dataset"
        yield Finding(
            Verdict.WARNING if shared else Verdict.OK,
            f"{len(held_out)} from {dataset.source}; {shared} of them are trained on",
            f"Give dataset and {setting} different files, ranges or seeds." if shared else "",
            check=f"held-out problems {name}".rstrip(),
        )
        yield from _warn_of_shortage(dataset, held_out, check=f"held-out problems {name}".rstrip())


def _warn_of_shortage(dataset: DatasetConfig, found: Problems, *, check: str = "") -> Iterator[Finding]:
    if (shortage := find_shortage(dataset, found)) is not None:
        yield Finding(Verdict.WARNING, shortage, "Lower size, or leave it out.", check=check)


def _check_agent(config: RunConfig) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as logs:
        prepare_agents(config, logs=Path(logs))
    for source, rollout in config.agents.items():
        match rollout.workflow:
            case None:
                yield Finding(Verdict.SKIPPED, "none is named: agents run elsewhere")
                continue
            case CommandConfig(command=command):
                name = " ".join(command)
            case PluginWorkflow() as workflow:
                name = workflow.plugin.describe()
            case reference:
                name = reference
        yield Finding(Verdict.OK, f"{name} can be run", check=f"agent {source}".rstrip())


def _check_sandbox(config: RunConfig) -> Iterator[Finding]:
    for sandbox in {rollout.openai.sandbox for rollout in config.agents.values()}:
        if sandbox.is_isolated:
            yield Finding(Verdict.OK, f"{create_sandbox(sandbox.backend).check(sandbox)} opens a sandbox")


def _check_functions(config: RunConfig) -> Iterator[Finding]:
    for tried in try_functions(config):
        yield Finding(Verdict.OK, f"{tried.setting}: {tried.reference} {tried.detail}")


def _check_settings(config: RunConfig) -> Iterator[Finding]:
    sizes = {size_setting(name): agent.group_size for name, agent in config.agents.items()}
    doubtful = [*advise(config), *find_singletons(config, sizes)]
    yield from (Finding(Verdict.WARNING, sentence) for sentence in doubtful)
    if not doubtful:
        yield Finding(Verdict.OK, "all settings of the trainer have an effect")


# --------------------------------------------------------------------------------------------------- this machine


def _check_directory(config: RunConfig) -> Iterator[Finding]:
    path = config.run_directory.path
    parent = next(each for each in (path, *path.parents) if each.exists())
    try:
        # Permissions do not tell: /proc and read-only mounts have those of any directory.
        TemporaryDirectory(prefix=".doctor-", dir=parent).cleanup()
    except OSError as error:
        detail = f"{parent} cannot be written: {error.strerror}"
        yield Finding(Verdict.FAILED, detail, "Set fileroot to a directory of yours.")
        return
    # The exported weights, the checkpoints that are kept, and the one that is being written.
    needed = _weight_bytes(config) * (1 + _OPTIMIZER_BYTES_PER_WEIGHT_BYTE * (config.checkpoint.keep + 1))
    free = shutil.disk_usage(parent).free
    detail = f"{path} can be written; {format_size(free)} free, checkpoints take {format_size(needed)}"
    if free > needed:
        yield Finding(Verdict.OK, detail)
    else:
        advice = "Free some space, lower checkpoint.keep, or set fileroot to another disk."
        yield Finding(Verdict.FAILED, detail, advice)


def _check_journal(config: RunConfig) -> Iterator[Finding]:
    path = (config.journal.path or config.run_directory.path).absolute()
    filesystem = filesystem_of(path)
    if is_network(filesystem) and config.journal.enabled:
        advice = "To serve external agents, set journal.path to a file on a local disk; train uses no such file."
        yield Finding(Verdict.WARNING, f"{path} would lie on {filesystem}, which several machines may mount", advice)
    else:
        yield Finding(Verdict.OK, f"on {filesystem or 'an unknown filesystem'}")


def _check_port(config: RunConfig) -> Iterator[Finding]:
    proxy = config.proxy
    if config.scheduler.roles.placed and proxy.admin_key is None:
        proxy = evolve(proxy, admin_key=create_admin_key())  # as such a run does
    bind(proxy).close()
    yield Finding(Verdict.OK, f"the proxy can listen at {proxy.host}, {proxy.port or 'any free port'}")


def _check_http_proxy(config: RunConfig) -> Iterator[Finding]:
    if variables := proxy_variables():
        hosts = ", ".join(dict.fromkeys(("loopback", config.proxy.host)))
        detail = f"requests go to the proxy in {', '.join(variables)}; those of agents to {hosts} do not (NO_PROXY)"
        yield Finding(Verdict.OK, detail)


def _check_open_files(config: RunConfig) -> Iterator[Finding]:
    limit = open_files_limit()
    size = max(agent.group_size for agent in config.agents.values())
    needed = _OWN_FILES + _FILES_PER_EPISODE * config.rollout.max_concurrent_rollouts * size
    if limit is None:
        yield Finding(Verdict.OK, "any number may be open")
    elif limit >= needed:
        yield Finding(Verdict.OK, f"{limit:,} files and connections may be open at once")
    else:
        advice = "Raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or lower rollout.max_concurrent_rollouts."
        detail = f"{limit:,} files and connections may be open at once, and this job may want {needed:,}"
        yield Finding(Verdict.WARNING, detail, advice)


def _check_device(config: RunConfig) -> Iterator[Finding]:
    import torch

    num_gpus = torch.cuda.device_count()
    if config.engine.device.startswith("cuda") and not num_gpus:
        detail = f"engine.device is {config.engine.device}, and torch {torch.__version__} sees no GPU"
        advice = "Set engine.device=cpu, or install a torch that was built for this machine's driver."
        yield Finding(Verdict.FAILED, detail, advice)
        return
    # The CPUs of this process, which a job or a container may have fewer of than the machine.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(num_gpus))
    yield Finding(Verdict.OK, names or f"no GPU; {cpus} CPUs")


def _check_memory(config: RunConfig) -> Iterator[Finding]:
    import torch

    from areal_actors.training.memory import device_bytes

    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    memory = {name: device_bytes(torch.device(name)) for name in devices}
    try:
        parts = predict_memory(config, memory)
    except ValueError as error:
        # transformers does not know the architecture, which the check of the model reports.
        yield Finding(Verdict.SKIPPED, str(error).splitlines()[0])
        return
    for device, available in memory.items():
        own = [part for part in parts if part.is_here and part.device == device]
        if not own:
            continue
        needed = sum(part.num_bytes for part in own) + (BASE_BYTES if device == "cpu" else 0)
        place, told = "this GPU" if device == "cuda" else "this machine", "; ".join(part.text for part in own)
        detail = f"{format_size(needed)} predicted, of {format_size(available)} of {place}: {told}"
        if needed <= _TIGHT * available:
            yield Finding(Verdict.OK, detail)
        else:
            yield Finding(Verdict.WARNING if needed <= available else Verdict.FAILED, detail, _LESS_MEMORY)
    if elsewhere := [part.text for part in parts if not part.is_here]:
        yield Finding(Verdict.OK, f"predicted elsewhere: {'; '.join(elsewhere)}")


def _weight_bytes(config: RunConfig) -> int:
    model = resolve_model(config.model, has_tokenizer=config.tokenizer is None)
    return sum(file.stat().st_size for file in model.path.glob("*.safetensors"))


# ---------------------------------------------------------------------------------------------- inference servers


def _check_servers(config: RunConfig) -> Iterator[Finding]:
    """Ask the servers that run already, or import the package of those to be started."""
    backend = config.rollout.backend
    if backend is Backend.TORCH:
        return
    settings: ServerConfig = getattr(config, backend)
    name = f"{backend} server"
    for url in settings.urls:
        yield from _run(name, _ask_server(url, backend, settings))
    if settings.urls:
        return
    if settings.command:
        yield Finding(Verdict.SKIPPED, f"{settings.command[0]} starts it", check=name)
    else:
        yield evolve(_import_server(config, backend, settings), check=name)
    if settings.port:
        yield from _run(f"{backend} port", _check_server_port(settings))


def _check_server_port(settings: ServerConfig) -> Iterator[Finding]:
    yield Finding(Verdict.OK, f"free: {', '.join(map(str, choose_ports(settings)))}")


def _ask_server(url: str, backend: Backend, settings: ServerConfig) -> Iterator[Finding]:
    async def describe() -> ServerFacts:
        async with create_client(url, api_key=read_key(settings), read_timeout_seconds=_ASK_SECONDS) as client:
            try:
                with anyio.fail_after(_ASK_SECONDS):
                    return await find_kind(backend).create().describe(client)
            except TimeoutError:
                message = f"{url} did not answer within {_ASK_SECONDS:g} s. Does the server run there?"
                raise EngineError(message) from None

    facts = anyio.run(describe)
    about = f"{facts.model}, {facts.context_length} tokens of context, {facts.dtype}"
    yield Finding(Verdict.OK, f"{url} is {facts.software} with {about}")


def _import_server(config: RunConfig, backend: Backend, settings: ServerConfig) -> Finding:
    """Import the package of a server in the Python and with the variables that start it."""
    kind, python = find_kind(backend), settings.python
    module = kind.module.partition(".")[0]
    environment = {name: value for name, value in os.environ.items() if name not in PYTHON_VARIABLES}
    environment |= {**kind.environment, **settings.environment}
    limit = min(_IMPORT_SECONDS, settings.start_timeout_seconds)
    advice = (
        f"Install {module} in a separate environment, and set {backend}.python to its Python. The documentation of "
        "servers has the two commands."
    )
    try:
        done = subprocess.run(  # noqa: S603 - the configuration's own interpreter
            [python, "-c", _IMPORT, module],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        return Finding(Verdict.FAILED, f"{python} cannot be run: {error}", advice)
    except subprocess.TimeoutExpired:
        return Finding(Verdict.FAILED, f"{python} did not import {module} within {limit:g} s", advice)
    said = done.stderr.strip().splitlines()[-3:]
    if done.returncode and said and said[-1] == f"ModuleNotFoundError: No module named '{module}'":
        return Finding(Verdict.FAILED, f"{python} does not find {module}", advice)
    if done.returncode:
        how = f"status {done.returncode}" if done.returncode > 0 else signal.Signals(-done.returncode).name
        # A package may need a GPU to be imported, which a node has and the machine that submits its job has not.
        scheduler = config.scheduler
        is_elsewhere = scheduler.type is SchedulerType.SLURM and Role.GENERATION in scheduler.roles.placed
        verdict, where = (Verdict.WARNING, " on this machine") if is_elsewhere else (Verdict.FAILED, "")
        reason = "\n".join(said)
        return Finding(verdict, f"{python} cannot import {module}{where} ({how}):\n{reason}", advice)
    version = done.stdout.splitlines()[-1]
    if version and parse_version(version) < kind.oldest:
        oldest = ".".join(map(str, kind.oldest))
        detail = f"{python} has {module} {version}; {oldest} is the oldest that can be used"
        return Finding(Verdict.FAILED, detail, advice)
    return Finding(Verdict.OK, f"{python} imports {module} {version}".rstrip())


# -------------------------------------------------------------------------------------------- room for workers


def _check_gang(config: RunConfig) -> Iterator[Finding]:
    scheduler, num_processes = config.scheduler, config.trainer.gang.num_processes
    is_slurm = scheduler.type is SchedulerType.SLURM
    if num_processes == 1 or (is_slurm and Role.TRAINER in scheduler.roles.placed):
        return
    # Only a trainer that is a job of a cluster can have several nodes.
    is_spread = is_slurm or scheduler.slurm.ranks_per_node is not None
    yield Finding(
        Verdict.WARNING if is_spread else Verdict.OK,
        f"all {num_processes} processes of trainer.gang run on this machine",
        "Nodes of a cluster need scheduler.type slurm and scheduler.roles.trainer." if is_spread else "",
    )


def _check_workers(config: RunConfig) -> Iterator[Finding]:
    placed, local = config.scheduler.roles.placed, config.scheduler.local
    if not placed or config.scheduler.type is SchedulerType.SLURM:
        return
    machine = find_machine(cpus=local.cpus, memory_mib=local.memory_mib, gpus=local.gpus)
    wanted = [
        settings.resources.times(config.num_tasks(role))
        for role, settings in placed.items()
        for _ in range(settings.replicas)
    ]
    Inventory(machine, is_shared=local.oversubscribe).check(f"The roles {', '.join(placed)} of the run", *wanted)
    yield Finding(Verdict.OK, f"{len(wanted)} processes find room in {machine}")


def _examine_cluster(config: RunConfig, *, has_trial: bool) -> Iterator[Finding]:
    """Check that Slurm answers, that nodes can reach the controller, and that a job of each role is accepted."""
    commands = SlurmCommands(timeout_seconds=config.scheduler.slurm.command_timeout_seconds)
    cluster = list(_run("slurm", _ask_cluster(commands)))
    yield from cluster
    yield from _run("controller", _check_controller(config))
    if _has_failed(cluster):
        yield Finding(Verdict.SKIPPED, "without a cluster, it is unknown whether it would accept them", check="jobs")
        return
    for role in config.scheduler.roles.placed:
        job = list(_run(f"job of {role}", _test_job(config, role, commands)))
        yield from job
        if _has_failed(job):
            yield Finding(Verdict.SKIPPED, "such a job is refused", check=f"trial of {role}")
        elif not has_trial:
            detail = "nothing was submitted; --submit tries a job of it on a node"
            yield Finding(Verdict.SKIPPED, detail, check=f"trial of {role}")
        else:
            yield from _run(f"trial of {role}", _try_job(config, role))


def _has_failed(findings: list[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAILED for finding in findings)


def _ask_cluster(commands: SlurmCommands) -> Iterator[Finding]:
    commands.check()
    anyio.run(commands.check_answers)
    yield Finding(Verdict.OK, anyio.run(commands.describe_cluster))


def _check_controller(config: RunConfig) -> Iterator[Finding]:
    address = controller_address(config.scheduler, Path())
    is_near = is_loopback(parse_address(address)[1])
    advice = "No other machine finds it there; name an interface in scheduler.address." if is_near else ""
    yield Finding(Verdict.WARNING if is_near else Verdict.OK, f"workers find it at {address}", advice)


def _test_job(config: RunConfig, role: Role, commands: SlurmCommands) -> Iterator[Finding]:
    """Submit a job as a test: Slurm answers for it, and does not queue it."""
    slurm, directory, settings = config.scheduler.slurm, config.run_directory.path, config.scheduler.roles.placed[role]
    request = JobRequest(
        run=secrets.token_hex(8),
        worker=f"{role}-0",
        life=0,
        directory=directory / "slurm",
        log=directory / "doctor.log",
        working_directory=Path.cwd(),
        resources=settings.resources,
        num_tasks=config.num_tasks(role),
        python=settings.python,
    )
    yield Finding(Verdict.OK, anyio.run(commands.test, create_arguments(request, slurm), render_script(request, slurm)))


def _try_job(config: RunConfig, role: Role) -> Iterator[Finding]:
    """Run a job with the resources of ``role``."""
    status = anyio.run(_run_job, config, role)
    if status.exit_code == 0:
        detail = f"{status.where} ran, wrote to the run directory and reached the controller"
        yield Finding(Verdict.OK, detail)
    else:
        advice = "fileroot has to be shared with the nodes, which have to find python and reach the controller."
        yield Finding(Verdict.FAILED, status.reason, advice)


async def _run_job(config: RunConfig, role: Role) -> PlacementStatus:
    """Return how a job with the resources of ``role`` ended. Raises ``SchedulerError`` if it does not end."""
    secret = secrets.token_bytes(32)
    config.run_directory.path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="doctor-", dir=config.run_directory.path) as directory:
        address = controller_address(config.scheduler, Path(directory))
        async with (
            listen(address, secret=secret, node="controller") as listener,
            SlurmScheduler.open(config.scheduler.slurm, directory=Path(directory), module=_HARMLESS) as scheduler,
        ):
            controller = ControllerAddress(address=listener.address, secret=secret)
            placed = config.scheduler.roles.placed[role]
            spec = worker_spec(f"{role}-0", placed, controller=controller, num_tasks=config.num_tasks(role))
            async with scheduler.place(spec) as placement:
                with anyio.move_on_after(config.scheduler.start_seconds):
                    return await placement.wait_ended()
                status = placement.status
    raise SchedulerError(
        f"The trial job has not ended within {config.scheduler.start_seconds:g} s (scheduler.start_seconds): "
        f"{status.state}, {status.reason or status.where}"
    )


_CHECKS: dict[str, Check] = {
    "packages": _check_packages,
    "model": _check_model,
    "problems": _check_problems,
    "agent": _check_agent,
    "sandbox": _check_sandbox,
    "functions": _check_functions,
    "settings": _check_settings,
    "run directory": _check_directory,
    "journal": _check_journal,
    "port": _check_port,
    "HTTP proxy": _check_http_proxy,
    "open files": _check_open_files,
    "device": _check_device,
    "memory": _check_memory,
    "servers": _check_servers,
    "gang": _check_gang,
    "workers": _check_workers,
}
"""The checks of every job by name, in the order of their findings. Those that do not concern a job find nothing."""
