"""Starting on Slurm: from ``sbatch`` to the first completion that an agent has.

A cluster of four nodes is started on this machine, by ``tests/schedulers/slurm_local``; where it cannot be, this
benchmark is skipped. The trainer, two engines and the proxy of the tiny job are jobs, as in ``examples/slurm.yaml``,
and what is timed is that of ``starting``. The baseline is a job that does nothing: from ``sbatch`` until it runs.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.harness import Result, Skipped
from benchmarks.starting import measure_start
from tests.schedulers.slurm_local.cluster import Cluster, open_cluster, why_not

from areal_actors.schedulers.slurm.files import SlurmFiles

_SETTINGS = (
    *("scheduler.slurm.poll_seconds=1", "scheduler.slurm.completing_seconds=10"),
    *("scheduler.roles.trainer.cpus=2", "scheduler.roles.generation.cpus=1"),
)
_SECONDS = 120.0
_LOOK_SECONDS = 0.01
_BASELINE = "sbatch of true"


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """Seconds until a bare job runs, and until a run whose roles are jobs has its first completion."""
    if why_not():
        raise Skipped(why_not())
    rounds = 1 if quick else 3
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as directory,  # paths of unix sockets are short
        open_cluster(Path(directory) / "c", prefix="bench", num_nodes=4) as cluster,
    ):
        bare, starts = [], []
        for number in range(rounds):
            bare.append(_run_bare(cluster, Path(directory, f"bare-{number}")))
            starts.append(_start(cluster))
    from_command, from_sbatch = min(command for command, _ in starts), min(sbatch for _, sbatch in starts)
    return [
        _figure(_BASELINE, min(bare)),
        _figure("first completion, from the command", from_command),
        _figure("first completion, from the first sbatch", from_sbatch),
        Result(
            benchmark="slurm",
            name="from the first sbatch, ratio",
            value=from_sbatch / min(bare),
            unit="ratio",
            baseline=_BASELINE,
        ),
    ]


def _figure(name: str, value: float) -> Result:
    return Result(benchmark="slurm", name=name, value=value, unit="s")


def _run_bare(cluster: Cluster, noted: Path) -> float:
    """Seconds from ``sbatch`` until what it submitted has run."""
    begun = time.perf_counter()
    cluster.run("sbatch", "--output=/dev/null", f"--wrap=true; touch {noted}")
    while not noted.exists():
        if time.perf_counter() - begun > _SECONDS:
            raise RuntimeError(f"A job of nothing has not run for {_SECONDS:g} s: {cluster.queue()}")
        time.sleep(_LOOK_SECONDS)
    return time.perf_counter() - begun


def _start(cluster: Cluster) -> tuple[float, float]:
    """Seconds to the first completion, from the command and from the first ``sbatch``."""
    settings = (*_SETTINGS, f"scheduler.address={cluster.address}")
    with tempfile.TemporaryDirectory() as name:
        directory, begun = Path(name), time.time()
        with measure_start("slurm.yaml", directory, settings=settings, environment=cluster.environment) as start:
            records = SlurmFiles(path=directory / "run" / "slurm").read_records()
        return start, start - (records[0].created_at - begun)
