"""Where workers are to live: what this machine has for them, or what a cluster says of jobs like theirs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from areal_actors.config import RunConfig
from areal_actors.domain import Role
from areal_actors.errors import SchedulerError
from areal_actors.kernel.remote import listen
from areal_actors.kernel.remote.sockets import is_loopback, parse_address
from areal_actors.run.control_plane import controller_address
from areal_actors.run.doctor.findings import Finding, Verdict, examined
from areal_actors.schedulers.accounting import Inventory, find_machine
from areal_actors.schedulers.base import ControllerAddress, PlacementState, PlacementStatus, WorkerSpec
from areal_actors.schedulers.config import RoleConfig, SchedulerType
from areal_actors.schedulers.slurm import SlurmCommands, SlurmScheduler
from areal_actors.schedulers.slurm.script import JobRequest, create_arguments, render_script

__all__ = ["examine_places"]

_HARMLESS = "platform"
"""The Python module that a trial job runs when it has started. It prints one line."""


def examine_places(config: RunConfig, *, has_trial: bool) -> Iterator[Finding]:
    """Look whether the roles that are placed find room. Blocks.

    ``has_trial``: a job of each role is submitted to the cluster, and waited for: it starts the interpreter of the role
    on a node, writes to the run directory, and reaches the controller.
    """
    placed = config.scheduler.roles.placed
    yield from _gang(config, is_placed=Role.TRAINER in placed)
    if not placed:
        return
    if config.scheduler.type is SchedulerType.LOCAL:
        yield from examined("workers", lambda: _local(config, placed))
        return
    cluster = examined("slurm", lambda: _cluster(config))
    yield from cluster
    yield from examined("controller", lambda: _controller(config))
    if any(finding.verdict is Verdict.FAILED for finding in cluster):
        yield _skipped("jobs", "without a cluster, it is unknown whether it would accept them")
        return
    for role, settings in placed.items():
        job = examined(f"job of {role}", partial(_job, config, role, settings))
        yield from job
        if any(finding.verdict is Verdict.FAILED for finding in job):
            yield _skipped(f"trial of {role}", "such a job is refused")
        elif has_trial:
            yield from examined(f"trial of {role}", partial(_trial, config, role))
        else:
            yield _skipped(f"trial of {role}", "nothing was submitted; --submit tries a job of it on a node")


def _skipped(check: str, why: str) -> Finding:
    return Finding(check=check, verdict=Verdict.SKIPPED, detail=why)


def _gang(config: RunConfig, *, is_placed: bool) -> Iterator[Finding]:
    """Several nodes are for a trainer that is a job of a cluster."""
    scheduler, num_processes = config.scheduler, config.trainer.gang.num_processes
    is_slurm = scheduler.type is SchedulerType.SLURM
    if num_processes == 1 or (is_slurm and is_placed):
        return
    is_spread = is_slurm or scheduler.slurm.ranks_per_node is not None
    yield Finding(
        check="gang",
        verdict=Verdict.WARNING if is_spread else Verdict.OK,
        detail=f"all {num_processes} processes of trainer.gang run on this machine",
        advice="Nodes of a cluster need scheduler.type slurm and scheduler.roles.trainer." if is_spread else "",
    )


def _local(config: RunConfig, placed: dict[Role, RoleConfig]) -> Iterator[Finding]:
    local = config.scheduler.local
    machine = find_machine(cpus=local.cpus, memory_mib=local.memory_mib, gpus=local.gpus)
    wanted = [
        settings.resources.times(config.num_tasks(role))
        for role, settings in placed.items()
        for _ in range(settings.replicas)
    ]
    Inventory(machine, is_shared=local.oversubscribe).check(f"The roles {', '.join(placed)} of the run", *wanted)
    detail = f"{len(wanted)} processes find room in {machine}"
    yield Finding(check="workers", verdict=Verdict.OK, detail=detail)


def _commands(config: RunConfig) -> SlurmCommands:
    return SlurmCommands(timeout_seconds=config.scheduler.slurm.command_timeout_seconds)


def _cluster(config: RunConfig) -> Iterator[Finding]:
    commands = _commands(config)
    commands.check()
    anyio.run(commands.check_answers)
    yield Finding(check="slurm", verdict=Verdict.OK, detail=anyio.run(commands.describe_cluster))


def _controller(config: RunConfig) -> Iterator[Finding]:
    address = controller_address(config.scheduler, Path())
    is_near = is_loopback(parse_address(address)[1])
    yield Finding(
        check="controller",
        verdict=Verdict.WARNING if is_near else Verdict.OK,
        detail=f"workers find it at {address}",
        advice="No other machine finds it there; name an interface in scheduler.address." if is_near else "",
    )


def _job(config: RunConfig, role: Role, settings: RoleConfig) -> Iterator[Finding]:
    """Return the answer of Slurm to a test submission of the job, which Slurm does not queue."""
    directory = config.run_directory.path
    request = JobRequest(
        run=secrets.token_hex(8),
        worker=f"{role}-0",
        life=0,
        directory=directory / "slurm",
        log=directory / "doctor.log",
        working_directory=(settings.working_directory or Path.cwd()).absolute(),
        resources=settings.resources,
        num_tasks=config.num_tasks(role),
        python=settings.python,
    )
    slurm = config.scheduler.slurm
    said = anyio.run(_commands(config).test, create_arguments(request, slurm), render_script(request, slurm))
    yield Finding(check=f"job of {role}", verdict=Verdict.OK, detail=said)


def _trial(config: RunConfig, role: Role) -> Iterator[Finding]:
    status = anyio.run(_run_trial, config, role)
    is_fine = status.state is PlacementState.ENDED and status.exit_code == 0
    detail = f"{status.where} ran, wrote to the run directory and reached the controller" if is_fine else status.reason
    yield Finding(
        check=f"trial of {role}",
        verdict=Verdict.OK if is_fine else Verdict.FAILED,
        detail=detail,
        advice=""
        if is_fine
        else "fileroot has to be shared with the nodes, which have to find python and reach the controller.",
    )


async def _run_trial(config: RunConfig, role: Role) -> PlacementStatus:
    secret = secrets.token_bytes(32)
    config.run_directory.path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="doctor-", dir=config.run_directory.path) as directory:
        address = controller_address(config.scheduler, Path(directory))
        async with (
            listen(address, secret=secret, node="controller") as listener,
            SlurmScheduler.open(config.scheduler.slurm, directory=Path(directory), module=_HARMLESS) as scheduler,
            scheduler.place(
                _spec(config, role, ControllerAddress(addresses=(listener.address,), secret=secret))
            ) as placement,
        ):
            with anyio.move_on_after(config.scheduler.start_seconds):
                return await placement.wait_ended()
            status = placement.status
    raise SchedulerError(
        f"The trial job has not ended within {config.scheduler.start_seconds:g} s (scheduler.start_seconds): "
        f"{status.state}, {status.reason or status.where}"
    )


def _spec(config: RunConfig, role: Role, controller: ControllerAddress) -> WorkerSpec:
    settings = config.scheduler.roles.placed[role]
    return WorkerSpec(
        name=f"{role}-0",
        controller=controller,
        resources=settings.resources,
        num_tasks=config.num_tasks(role),
        python=settings.python,
        environment=settings.environment,
        working_directory=settings.working_directory,
    )
