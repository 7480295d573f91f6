"""Check that there are resources for workers: on this machine, or on a cluster that accepts their jobs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from areal_actors.config import RunConfig
from areal_actors.domain import Role
from areal_actors.errors import SchedulerError
from areal_actors.kernel.remote import listen
from areal_actors.kernel.remote.sockets import is_loopback, parse_address
from areal_actors.run.control_plane import controller_address
from areal_actors.run.doctor.findings import Examination, Finding, Verdict
from areal_actors.run.supervise import worker_spec
from areal_actors.schedulers.accounting import Inventory, find_machine
from areal_actors.schedulers.base import ControllerAddress, PlacementStatus
from areal_actors.schedulers.config import SchedulerType
from areal_actors.schedulers.slurm import SlurmCommands, SlurmScheduler
from areal_actors.schedulers.slurm.script import JobRequest, create_arguments, render_script

_HARMLESS = "platform"
"""The Python module that a trial job runs when it has started. It prints one line."""

_TRIAL_ADVICE = "fileroot has to be shared with the nodes, which have to find python and reach the controller."


def examine_places(config: RunConfig, *, has_trial: bool) -> Iterator[Finding]:
    """Check that there are resources for the roles in workers. Blocks.

    With ``has_trial``, a job of each role is submitted to the cluster and awaited: it starts the interpreter of the
    role on a node, writes to the run directory, and reaches the controller.
    """
    scheduler, num_processes = config.scheduler, config.trainer.gang.num_processes
    placed, is_slurm = scheduler.roles.placed, scheduler.type is SchedulerType.SLURM
    if num_processes > 1 and not (is_slurm and Role.TRAINER in placed):
        # Only a trainer that is a job of a cluster can have several nodes.
        is_spread = is_slurm or scheduler.slurm.ranks_per_node is not None
        yield Finding(
            check="gang",
            verdict=Verdict.WARNING if is_spread else Verdict.OK,
            detail=f"all {num_processes} processes of trainer.gang run on this machine",
            advice="Nodes of a cluster need scheduler.type slurm and scheduler.roles.trainer." if is_spread else "",
        )
    if not placed:
        return
    if is_slurm:
        yield from _examine_cluster(config, has_trial=has_trial)
        return
    with Examination("workers") as found:
        local = scheduler.local
        machine = find_machine(cpus=local.cpus, memory_mib=local.memory_mib, gpus=local.gpus)
        wanted = [
            settings.resources.times(config.num_tasks(role))
            for role, settings in placed.items()
            for _ in range(settings.replicas)
        ]
        Inventory(machine, is_shared=local.oversubscribe).check(f"The roles {', '.join(placed)} of the run", *wanted)
        found.add(Verdict.OK, f"{len(wanted)} processes find room in {machine}")
    yield from found.findings


def _examine_cluster(config: RunConfig, *, has_trial: bool) -> Iterator[Finding]:
    """Check that Slurm answers, that nodes can reach the controller, and that a job of each role is accepted."""
    commands = SlurmCommands(timeout_seconds=config.scheduler.slurm.command_timeout_seconds)
    with Examination("slurm") as cluster:
        commands.check()
        anyio.run(commands.check_answers)
        cluster.add(Verdict.OK, anyio.run(commands.describe_cluster))
    yield from cluster.findings
    with Examination("controller") as found:
        address = controller_address(config.scheduler, Path())
        is_near = is_loopback(parse_address(address)[1])
        advice = "No other machine finds it there; name an interface in scheduler.address." if is_near else ""
        found.add(Verdict.WARNING if is_near else Verdict.OK, f"workers find it at {address}", advice)
    yield from found.findings
    if cluster.has_failed:
        why = "without a cluster, it is unknown whether it would accept them"
        yield Finding(check="jobs", verdict=Verdict.SKIPPED, detail=why)
        return
    slurm, directory = config.scheduler.slurm, config.run_directory.path
    for role, settings in config.scheduler.roles.placed.items():
        with Examination(f"job of {role}") as job:
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
            # A test submission: Slurm answers for it, and does not queue it.
            answer = anyio.run(commands.test, create_arguments(request, slurm), render_script(request, slurm))
            job.add(Verdict.OK, answer)
        yield from job.findings
        with Examination(f"trial of {role}") as trial:
            if job.has_failed:
                trial.add(Verdict.SKIPPED, "such a job is refused")
            elif not has_trial:
                trial.add(Verdict.SKIPPED, "nothing was submitted; --submit tries a job of it on a node")
            elif (status := anyio.run(_try_job, config, role)).exit_code == 0:
                trial.add(Verdict.OK, f"{status.where} ran, wrote to the run directory and reached the controller")
            else:
                trial.add(Verdict.FAILED, status.reason, _TRIAL_ADVICE)
        yield from trial.findings


async def _try_job(config: RunConfig, role: Role) -> PlacementStatus:
    """Run a job with the resources of ``role``, and return how it ended. Raises ``SchedulerError`` if it does not."""
    secret = secrets.token_bytes(32)
    config.run_directory.path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="doctor-", dir=config.run_directory.path) as directory:
        address = controller_address(config.scheduler, Path(directory))
        async with (
            listen(address, secret=secret, node="controller") as listener,
            SlurmScheduler.open(config.scheduler.slurm, directory=Path(directory), module=_HARMLESS) as scheduler,
        ):
            controller = ControllerAddress(addresses=(listener.address,), secret=secret)
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
