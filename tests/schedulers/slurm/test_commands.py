"""Slurm's commands as processes: clean, bounded, and told apart by what they say. Programs are small scripts."""

from __future__ import annotations

import time

import anyio
import pytest
from tests.schedulers.slurm.scripted import commands

from areal_actors.errors import SchedulerError
from areal_actors.schedulers.slurm.commands import (
    JobRefused,
    SlurmCommands,
    clean_environment,
)

pytestmark = pytest.mark.anyio


def test_environment_is_cleaned():
    """Of options in disguise, of another job's devices, and of secrets; not of what finds the cluster."""
    kept = {"SLURM_CONF": "c", "SLURM_JWT": "j", "PATH": "p", "HOME": "h", "PYTHONPATH": "s", "SLURMISH": "x"}
    leaked = (
        "SLURM_JOB_ID SLURM_CPU_BIND SBATCH_EXCLUSIVE SBATCH_PARTITION SRUN_CPUS_PER_TASK SALLOC_X SQUEUE_FORMAT "
        "SCANCEL_STATE SINFO_FORMAT SACCT_FORMAT PMI_RANK PMIX_RANK PMI2_X CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES "
        "GPU_DEVICE_ORDINAL AREAL_BOOTSTRAP AREAL_ADMIN_KEY SLURMD_NODENAME"
    )

    assert kept == clean_environment(kept | dict.fromkeys(leaked.split(), "x"))


async def test_commands_see_the_clean_environment_and_the_script(tmp_path):
    """What the job is to have is there beside it; the script comes on standard input."""
    one = commands(
        tmp_path,
        environment={"SBATCH_HOLD": "1"},
        sbatch='cat >"$0.in"; env >"$0.env"; printf "%s\\n" "$@" >"$0.args"; echo "9;n"',
    )
    found = await one.submit(("--a b", "--c"), "the script", environment={"KEY": "v"})

    assert 9 == found
    assert "the script" == (tmp_path / "sbatch.in").read_text()
    assert "--a b\n--c\n" == (tmp_path / "sbatch.args").read_text()
    environment = (tmp_path / "sbatch.env").read_text().splitlines()
    assert "KEY=v" in environment
    assert not [line for line in environment if line.startswith("SBATCH_")]


async def test_output_of_command_that_ignores_its_input_is_read(tmp_path):
    """It has failed before it came to the script, which fills more than a pipe."""
    with pytest.raises(JobRefused, match="no configuration"):
        await commands(tmp_path, sbatch="echo no configuration >&2; exit 1").submit((), "x" * 1_000_000)


async def test_cluster_that_does_not_answer_is_an_error(tmp_path):
    """It is said at once, with the words of Slurm, and what to do."""
    with pytest.raises(SchedulerError, match=r"No Slurm cluster answers here: .*DNS SRV lookup failed(?s:.*)sinfo"):
        await commands(tmp_path, sinfo="echo DNS SRV lookup failed >&2; exit 1").check_answers()
    await commands(tmp_path).check_answers()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("echo 'sbatch: error: Invalid partition name specified' >&2; exit 1", JobRefused),
        ("exit 1", JobRefused),
        ("echo 'Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1", SchedulerError),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", SchedulerError),
        ("echo 'Batch job submission failed: Protocol authentication error' >&2; exit 1", SchedulerError),
        ("echo welcome to the cluster", SchedulerError),
        ("exec sleep 60", SchedulerError),
    ],
)
async def test_submission_is_refused_or_unconfirmed(tmp_path, script, kind):
    """Only a definite refusal counts as one."""
    timeout_seconds = 0.5 if "sleep" in script else 30.0
    one = commands(tmp_path, timeout_seconds=timeout_seconds, sbatch=f"cat >/dev/null; {script}")
    with pytest.raises(SchedulerError) as caught:
        await one.submit((), "x")

    assert kind is caught.type


@pytest.mark.parametrize(
    "script",
    ["echo slurm_load_jobs error >&2; exit 1", "echo '%%|garbage'", "exec sleep 60", "head -c 9999 /dev/urandom"],
)
async def test_unreadable_queue_is_an_error(tmp_path, script):
    """It raises, within its time limit."""
    with pytest.raises(SchedulerError, match="squeue"):
        await commands(tmp_path, timeout_seconds=0.5, squeue=script).list_jobs(("x",))


async def test_jobs_of_others_are_left_out(tmp_path):
    """Whatever a cluster makes of the filter."""
    said = r"printf '1|mine|RUNNING|n1|None\n2|other|RUNNING|n1|None\n'"

    assert [1] == [row.job for row in await commands(tmp_path, squeue=said).list_jobs(("mine",))]
    assert () == await commands(tmp_path).list_jobs(("mine",))


async def test_cancelling_an_ended_job_is_ignored(tmp_path):
    """Its number is not known any more; another failure is one."""
    over = commands(
        tmp_path, scancel="echo 'scancel: error: Kill job error on job id 7: Invalid job id specified' >&2; exit 1"
    )
    await over.cancel(7)
    with pytest.raises(SchedulerError, match=r"scancel failed.*contact"):
        await commands(tmp_path, scancel="echo 'unable to contact' >&2; exit 8").cancel(7)


async def test_event_loop_goes_on_while_a_command_hangs(tmp_path):
    """A hanging squeue costs its time limit, and no tick."""
    one = commands(tmp_path, timeout_seconds=0.5, squeue="exec sleep 60")
    ticks = []

    async def tick():
        while True:
            ticks.append(time.monotonic())
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        with pytest.raises(SchedulerError, match=r"within 0.5 s"):
            await one.list_jobs(("x",))
        tasks.cancel_scope.cancel()

    assert len(ticks) >= 5


def test_missing_slurm_is_an_error(tmp_path):
    """With what to do."""
    with pytest.raises(SchedulerError, match=r"Slurm is not installed here: sbatch.*login node"):
        SlurmCommands(environment={"PATH": str(tmp_path)}).check()
