"""Slurm's commands, each run as a process with a time limit and a clean environment, on either event loop.

``queue`` parses their output. While slurmctld does not answer, sbatch waits for seconds and squeue for a quarter of a
minute; while munge hangs, both wait indefinitely. Therefore every call has a time limit. A submission that times out is
neither accepted nor rejected; the scheduler looks for the job by its name before it submits again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile

import anyio
from attrs import field, frozen

from areal_actors.errors import SchedulerError
from areal_actors.lib.telemetry import get_logger
from areal_actors.schedulers.slurm.queue import (
    QUEUE_FORMAT,
    ExitStatus,
    JobRow,
    parse_job,
    parse_queue,
    parse_submitted,
)

_log = get_logger(__name__)

# Variables that act as options, variables of the job in which the controller runs, and our own secrets.
_FOREIGN = re.compile(
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SACCT|SINFO|SCONTROL|SSTAT|PMI|PMIX|PMI2)_.*"
    r"|PMI\w*|(CUDA|HIP|ROCR|GPU)_(VISIBLE_DEVICES|DEVICE_ORDINAL)|ZE_AFFINITY_MASK|AREAL_BOOTSTRAP|AREAL_ADMIN_KEY"
)
# These locate the cluster and authenticate the user.
_KEPT = frozenset({"SLURM_CONF", "SLURM_JWT"})
# Errors after which the job may or may not have been accepted.
_UNSURE = re.compile(
    r"timed out|unable to contact|zero bytes|connection (refused|reset)|communication|protocol authentication"
    r"|slurm_(receive|send)_?|temporarily unable|resource temporarily unavailable|munge",
    re.IGNORECASE,
)
_NEEDED = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
_INVALID_JOB = "Invalid job id"
_CLEAR_SECONDS = 5
RETRY_SECONDS = 2.0
"""Pause before a queue that could not be read is read again."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without options for Slurm, variables of another job, and secrets.

    Otherwise a controller that itself runs in a job, or a shell with ``SBATCH_EXCLUSIVE=1``, would change every job.
    """
    return {name: value for name, value in environment.items() if name in _KEPT or not _FOREIGN.fullmatch(name)}


class JobRefused(SchedulerError):
    """Slurm has answered, and rejects the job."""


@frozen(kw_only=True)
class _Answer:
    status: int
    output: str
    errors: str


@frozen(kw_only=True)
class SlurmCommands:
    """The cluster, as its user sees it.

    Every method may raise ``SchedulerError``, if there is no answer or if the answer is an error.
    """

    environment: Mapping[str, str] = field(factory=lambda: dict(os.environ), repr=False)
    timeout_seconds: float = 20.0
    user: str = field(factory=lambda: str(os.getuid()))

    def check(self) -> None:
        """Raise ``SchedulerError`` if Slurm is not installed."""
        missing = [command for command in _NEEDED if shutil.which(command, path=self._path) is None]
        if missing:
            raise SchedulerError(
                f"Slurm is not installed here: {', '.join(missing)} cannot be found in PATH. Run this where jobs can "
                "be submitted, such as a login node, with Slurm's bin directory in PATH (often `module load slurm`)."
            )

    async def submit(
        self, arguments: Sequence[str], script: str, *, environment: Mapping[str, str] | None = None
    ) -> int:
        """Submit a job, and return its number.

        Its environment is that of this object, cleaned, with the variables of ``environment``.

        Raises:
            JobRefused: Slurm rejects the job.
            SchedulerError: it is unknown whether Slurm has accepted the job.
        """
        answer = await self._run("sbatch", *arguments, text=script, environment=environment or {})
        job = parse_submitted(answer.output) if answer.status == 0 else None
        if job is not None:
            return job
        why = answer.errors or answer.output or f"sbatch ended with status {answer.status} and said nothing"
        # Success without a job number is doubtful as well: there may be a job.
        is_unsure = answer.status == 0 or _UNSURE.search(why) is not None
        raise SchedulerError(why) if is_unsure else JobRefused(why)

    async def test(self, arguments: Sequence[str], script: str) -> str:
        """Return what Slurm says about a job that it does not keep: when and where it would start.

        Raises:
            SchedulerError: Slurm rejects the job.
        """
        answer = await self._run("sbatch", "--test-only", *arguments, text=script)
        if answer.status != 0:
            raise SchedulerError(f"Slurm refuses such a job: {answer.errors or answer.output}")
        return answer.errors.removeprefix("sbatch: ") or "Slurm would take such a job"

    async def check_answers(self) -> None:
        """Raise ``SchedulerError`` if no cluster answers."""
        try:
            await self._ask("sinfo", "--noheader", "--format=%P")
        except SchedulerError as error:
            raise SchedulerError(
                f"No Slurm cluster answers here: {error}\nRun this where jobs can be submitted, and `sinfo` lists them."
            ) from error

    async def describe_cluster(self) -> str:
        """Return the partitions with their state and nodes, in one line."""
        rows = (await self._ask("sinfo", "--noheader", "--format=%P|%a|%D|%c|%G")).splitlines()
        told = [row.split("|") for row in rows if row.count("|") == 4]  # noqa: PLR2004 - the columns above
        return "; ".join(f"{name} {state}: {num} nodes of {cpus} CPUs, {gres}" for name, state, num, cpus, gres in told)

    async def list_jobs(self, names: Sequence[str]) -> tuple[JobRow, ...]:
        """Return the jobs with these names, including those that ended recently."""
        rows = await self._ask(
            "squeue", "--noheader", "--states=all", f"--user={self.user}", f"--format={QUEUE_FORMAT}",
            f"--name={','.join(names)}",
        )  # fmt: skip
        found = parse_queue(rows)
        # Unreadable output is not an empty queue: the jobs may still exist.
        if rows.strip() and not found:
            raise SchedulerError(f"squeue said what cannot be read: {rows.strip()[:200]!r}")
        # Do not rely on the filter of squeue.
        return tuple(row for row in found if row.name in names)

    async def wait_for_jobs(self, names: Sequence[str], *, deadline: float) -> tuple[JobRow, ...]:
        """Return what ``list_jobs`` does, once the cluster answers.

        Raises:
            SchedulerError: it has not answered by ``deadline``, a time of the event loop's clock.
        """
        while True:
            try:
                return await self.list_jobs(names)
            except SchedulerError as error:
                if anyio.current_time() >= deadline:
                    raise
                _log.warning("queue_not_read", reason=str(error))
            await anyio.sleep(RETRY_SECONDS)

    async def cancel(self, job: int) -> None:
        """End a job: SIGTERM, then SIGKILL after the cluster's KillWait. A job that has ended already is ignored."""
        await self._ask("scancel", str(job), fine=_INVALID_JOB)

    async def cancel_named(self, name: str) -> None:
        """End all jobs of this user with this exact name; there may be none."""
        await self._ask("scancel", f"--user={self.user}", f"--name={name}")

    async def warn(self, job: int) -> None:
        """Send SIGTERM to the steps of a running job, without cancelling it."""
        await self._ask("scancel", "--signal=TERM", str(job), fine=_INVALID_JOB)

    async def describe(self, job: int) -> ExitStatus | None:
        """Return what slurmctld knows about a job, or ``None`` if it knows no such job."""
        return parse_job(await self._ask("scontrol", "show", "job", "--oneliner", str(job), fine=_INVALID_JOB))

    async def start_soon(self, job: int) -> None:
        """Start a requeued job after a few seconds instead of the two minutes that Slurm makes it wait."""
        # Not at once: a node that has just ended a job considers a launch revoked if it is dated no later than that
        # end. The two clocks count whole seconds, so the job would fail before it starts.
        # When requeued jobs started at once on the same node, half of them failed with "Job credential revoked".
        await self._ask("scontrol", "update", f"JobId={job}", f"StartTime=now+{_CLEAR_SECONDS}")

    async def _ask(self, command: str, *arguments: str, fine: str = "\0") -> str:
        answer = await self._run(command, *arguments)
        if answer.status != 0 and fine not in answer.errors:
            raise SchedulerError(f"{command} failed with status {answer.status}: {answer.errors or answer.output}")
        return answer.output

    async def _run(
        self, command: str, *arguments: str, text: str = "", environment: Mapping[str, str] | None = None
    ) -> _Answer:
        program = shutil.which(command, path=self._path)
        if program is None:
            raise SchedulerError(f"{command} cannot be found in PATH; is Slurm installed here?")
        variables = {**clean_environment(self.environment), **(environment or {})}
        try:
            # A file: a command that exits before it has read all of a pipe breaks it, and its error message is lost.
            with anyio.fail_after(self.timeout_seconds), TemporaryFile() as stdin:
                stdin.write(text.encode())
                stdin.seek(0)
                # A new session: Ctrl-C is for this process, and must not interrupt a submission.
                done = await anyio.run_process(
                    [program, *arguments], stdin=stdin, env=variables, check=False, start_new_session=True
                )
        except TimeoutError:
            raise SchedulerError(f"{command} did not answer within {self.timeout_seconds:g} s") from None
        except (OSError, ValueError) as error:
            # ValueError: NUL bytes in arguments or variables.
            raise SchedulerError(f"{command} cannot be run: {error}") from None
        return _Answer(status=done.returncode, output=_text(done.stdout), errors=_text(done.stderr))

    @property
    def _path(self) -> str:
        return self.environment.get("PATH", os.defpath)


def _text(said: bytes) -> str:
    return said.decode(errors="replace").strip()
