"""What is handed to sbatch: golden text, and what no text can do to it. Scripts run in bash."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_actors.schedulers.base import Resources
from areal_actors.schedulers.slurm import ContainerConfig, ContainerType, GpuOption, SlurmConfig
from areal_actors.schedulers.slurm.script import JobRequest, create_arguments, render_script

REQUEST = JobRequest(
    run="0123456789abcdef",
    worker="generation-1",
    life=2,
    directory=Path("/shared/my runs/sums/slurm"),
    log=Path("/shared/my runs/sums/logs/100%.log"),
    working_directory=Path("/home/ada"),
    resources=Resources(cpus=4, memory_mib=2000, gpus=2),
    python=Path("/opt/py/bin/python"),
)
SITE = SlurmConfig(
    partition="gpu",
    account="lab",
    exclude="n[1-3]",
    time_minutes=90,
    setup=("module load cuda", 'export NOTE="$HOME"'),
    extra_arguments=("--qos=high", "--constraint=a100&nvlink", "--reservation=r", "--exclusive", "--licenses=x:2"),
)
ARGUMENTS = """\
--parsable
--job-name=aa-0123456789abcdef-generation-1.2
--comment=areal_actors run=0123456789abcdef worker=generation-1 life=2
--nodes=1
--ntasks-per-node=1
--cpus-per-task=4
--mem=2000M
--gpus-per-node=2
--time=90
--signal=B:USR1@180
--requeue
--open-mode=append
--output=/shared/my runs/sums/logs/100%%.log
--chdir=/home/ada
--export=ALL
--partition=gpu
--account=lab
--exclude=n[1-3]
--qos=high
--constraint=a100&nvlink
--reservation=r
--exclusive
--licenses=x:2"""
GOLDEN = Path(__file__).with_name("golden")


def test_arguments_of_sbatch():
    """One text for one request, whatever the environment."""
    assert ARGUMENTS.split("\n") == list(create_arguments(REQUEST, SITE))


@pytest.mark.parametrize("name", ["plain", "pyxis", "apptainer"])
def test_script_of_a_worker(name):
    """Compared with a file; in a container, the same step within it."""
    container = {
        "plain": None,
        "pyxis": ContainerConfig(type=ContainerType.PYXIS, image="registry#org/image:1", mounts=("/data:/data",)),
        "apptainer": ContainerConfig(type=ContainerType.APPTAINER, image="/images/a b.sif", mounts=("/data",)),
    }[name]

    assert (GOLDEN / f"{name}.sh").read_text() == render_script(REQUEST, evolve(SITE, container=container))


@pytest.mark.parametrize("name", ["gang", "gang-pyxis"])
def test_script_of_a_gang(name):
    """All processes are tasks of one step, in a container or not."""
    container = (
        ContainerConfig(type=ContainerType.PYXIS, image="registry#org/image:1") if name == "gang-pyxis" else None
    )
    gang = evolve(REQUEST, worker="trainer-0", num_tasks=4)

    assert (GOLDEN / f"{name}.sh").read_text() == render_script(
        gang, evolve(SITE, container=container, ranks_per_node=2)
    )


@pytest.mark.parametrize(
    ("num_tasks", "ranks_per_node", "arguments"),
    [
        (1, 4, "--nodes=1 --ntasks-per-node=1 --cpus-per-task=4 --mem=2000M --gpus-per-node=2"),
        (4, None, "--nodes=1 --ntasks=4 --ntasks-per-node=4 --cpus-per-task=4 --mem=8000M --gpus-per-node=8"),
        (4, 2, "--nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=4 --mem=4000M --gpus-per-node=4"),
        (3, 2, "--nodes=2 --ntasks=3 --ntasks-per-node=2 --cpus-per-task=4 --mem=4000M --gpus-per-node=4"),
        (4, 8, "--nodes=1 --ntasks=4 --ntasks-per-node=4 --cpus-per-task=4 --mem=8000M --gpus-per-node=8"),
    ],
)
def test_each_process_of_a_gang_gets_resources_of_its_role(num_tasks, ranks_per_node, arguments):
    """What Slurm counts for a node is what its processes have together."""
    found = create_arguments(evolve(REQUEST, num_tasks=num_tasks), evolve(SITE, ranks_per_node=ranks_per_node))

    assert arguments in " ".join(found)


def test_unset_options_are_left_out():
    """No memory, GPUs or site settings without a wish for them; a site may want GPUs in another way, or no requeue."""
    plain = evolve(REQUEST, resources=Resources())
    bare = " ".join(create_arguments(plain, SlurmConfig(max_requeues=0)))

    assert not [word for word in ("--mem", "--gpus", "--gres", "--partition", "--account") if word in bare]
    assert "--no-requeue" in bare
    assert "--exclude=n[1-3],n7" in create_arguments(evolve(REQUEST, avoided=("n7",)), SITE)
    assert "--gres=gpu:2" in create_arguments(REQUEST, SlurmConfig(gpu_option=GpuOption.GRES))
    assert "gpu" not in " ".join(create_arguments(REQUEST, SlurmConfig(gpu_option=GpuOption.NONE)))


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("extra_arguments", ("--output=x",), "has a setting of its own"),
        ("extra_arguments", ("--wrap=x",), "of our hands"),
        ("extra_arguments", ("x",), "--option=value"),
        ("extra_arguments", ("--nice=1\n2",), "--option=value"),
        ("partition", "a b", "without spaces"),
        ("partition", "", "without spaces"),
        ("setup", ("a\nb",), "one line"),
        ("margin_seconds", 60, "must be less"),
        ("margin_seconds", 65_536, "65535"),
    ],
)
def test_invalid_settings_are_refused(setting, value, words):
    """By name, before anything is submitted."""
    with pytest.raises(ValueError, match=words):
        SlurmConfig(**{setting: value, "time_minutes": 1})


_text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=30)


@given(text=_text)
@settings(max_examples=15)
def test_no_path_can_become_a_command(tmp_path_factory, text):
    """A script with any text for its paths and interpreter passes them on as they are."""
    directory = tmp_path_factory.mktemp("text")
    # The working directory appears in a script within a container alone: it is an argument of apptainer there.
    request = evolve(REQUEST, python=Path(text), working_directory=Path(text), directory=directory)
    script = render_script(request, SlurmConfig(container=ContainerConfig(type=ContainerType.APPTAINER, image="image")))
    said = run_script(directory, script, srun='printf "%s\\0" "$@" >"$0.said"')

    words = (directory / "bin" / "srun.said").read_bytes().decode().split("\0")
    assert said.returncode == 0, said.stderr
    assert str(Path(text)) == words[words.index("image") + 1]
    assert str(Path(text)) == words[words.index("--pwd") + 1]


def run_script(directory, script, *, srun="exit 0", scontrol='echo "$@" >"$0.said"', restarts=None):
    """Run a script with stand-ins for Slurm's programs."""
    (directory / "bin").mkdir(exist_ok=True)
    for name in ("exit", "stop"):
        (directory / name).mkdir(exist_ok=True)
    for name, text in {"srun": srun, "scontrol": scontrol}.items():
        program = directory / "bin" / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    environment = {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        **({} if restarts is None else {"SLURM_RESTART_COUNT": str(restarts)}),
    }
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run([bash], input=script.encode(), env=environment, capture_output=True, timeout=20, check=False)


@pytest.mark.parametrize(
    ("srun", "restarts", "status", "asks"),
    [
        ("exit 0", None, 0, False),
        ("exit 3", 1, 3, False),
        ("exit 75", None, 75, True),
        ("exit 75", 3, 75, False),
        ("exit 76", None, 76, False),
        ("kill -9 $$", None, 137, False),
        ("trap 'exit 75' USR1; kill -USR1 $PPID; for i in 1 2 3 4 5 6; do sleep 0.5; done", None, 75, True),
        ("kill -TERM $PPID; sleep 0.5; exit 75", None, 75, False),
        ('touch "$AREAL_BOOTSTRAP.seen"; exit 0', None, 0, False),
    ],
)
def test_script_records_exit_status_and_requeues_on_75(tmp_path, srun, restarts, status, asks):
    """Not for ever, and not where the cluster ends the job: then it decides. A warning is passed on to the worker."""
    (tmp_path / "bootstrap").mkdir()
    done = run_script(
        tmp_path, render_script(evolve(REQUEST, directory=tmp_path), SlurmConfig()), srun=srun, restarts=restarts
    )

    assert status == done.returncode, done.stderr
    assert str(status) == (tmp_path / "exit" / f"{REQUEST.name}.7-{restarts or 0}").read_text().split()[0]
    assert asks == (tmp_path / "bin" / "scontrol.said").exists()


def test_stopped_job_does_not_start(tmp_path):
    """It may have waited in the queue while its controller left."""
    (tmp_path / "stop").mkdir()
    (tmp_path / "stop" / REQUEST.name).touch()
    done = run_script(
        tmp_path, render_script(evolve(REQUEST, directory=tmp_path), SlurmConfig()), srun='touch "$0.said"'
    )

    assert done.returncode == 0
    assert not (tmp_path / "bin" / "srun.said").exists()
    assert b"taken back" in done.stdout
