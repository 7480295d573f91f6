"""Starting: from the command to the first completion that an agent has, with all roles at home and in processes.

What is started is the tiny job as a person starts it, ``areal-actors train``; its agent notes when it has its first
answer, and the run is told to end. Everything is in that time: imports, the placement of the workers, their handshakes,
the model, the first publication of its weights and the engine's self-test. The baseline is a process that imports torch
and ends, which each worker that computes has to do as well; on few cores they wait for each other. Seconds on the
clock, the least of some runs. ``slurm`` measures the same with jobs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from benchmarks.harness import Result
from benchmarks.machine import ROOT
from examples.tiny_agent import TinyAgent

__all__ = ["NotingAgent", "measure_start", "run"]

_SECONDS = 600.0
"""How long a run may take to start, or to end."""
_LOOK_SECONDS = 0.01
_NUM_LINES_OF_FAILURE = 12
_CONFIGS = {"all at home": "tiny.yaml", "roles in processes": "local_processes.yaml"}


class NotingAgent(TinyAgent):
    """Notes in ``path`` when the first of all episodes had its answer, in seconds since 1970."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask once."""
        reward = await super().run(data, **extra_kwargs)
        with suppress(FileExistsError):
            async with await anyio.open_file(self.path, "x", encoding="utf-8") as file:
                await file.write(f"{time.time()!r}\n")
        return reward


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the signature of every benchmark
    """Seconds to the first completion, and how many times those of a bare child with torch that is."""
    rounds, baseline = 1 if quick else 3, "import torch"
    _import_torch()  # from now on, the disk's cache is warm
    bare: list[float] = []
    starts: dict[str, list[float]] = {name: [] for name in _CONFIGS}
    for _ in range(rounds):
        for name, config in _CONFIGS.items():
            bare.append(_import_torch())
            with tempfile.TemporaryDirectory() as directory, measure_start(config, Path(directory)) as seconds:
                starts[name].append(seconds)
    results = [_figure(baseline, min(bare))]
    for name, found in starts.items():
        value = min(found) / min(bare)
        results.append(_figure(f"{name}, first completion", min(found)))
        results.append(
            Result(benchmark="starting", name=f"{name}, ratio", value=value, unit="ratio", baseline=baseline)
        )
    return results


def _figure(name: str, value: float) -> Result:
    return Result(benchmark="starting", name=name, value=value, unit="s")


def _import_torch() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begun


@contextmanager
def measure_start(
    config: str, directory: Path, *, settings: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[float]:
    """Start an example, and give the seconds to its first completion while it still runs.

    Its run directory is ``directory / "run"``. Raises ``RuntimeError`` with what it said if it ends before.
    """
    noted = directory / "noted"
    command = [
        *(sys.executable, "-m", "areal_actors", "train", f"examples/{config}", f"--run-dir={directory / 'run'}"),
        *("total_steps=1", "batch_size=1", "rollout.group_size=2", "eval_dataset=null", "logging.display=plain"),
        *("rollout.workflow=benchmarks.starting.NotingAgent", f"rollout.workflow_kwargs={{path: {noted}}}"),
        *settings,
    ]
    inherited = dict(os.environ if environment is None else environment)
    path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    with (directory / "said").open("wb") as said:
        begun = time.time()
        child = subprocess.Popen(command, cwd=ROOT, env=inherited | {"PYTHONPATH": path}, stdout=said, stderr=said)
        try:
            yield _wait(child, noted, directory / "said") - begun
        finally:
            child.terminate()  # a run that is told to ends its workers
            with suppress(subprocess.TimeoutExpired):
                child.wait(_SECONDS)
            child.kill()
            child.wait()


def _wait(child: subprocess.Popen[bytes], noted: Path, said: Path) -> float:
    """When the first completion was there."""
    deadline = time.monotonic() + _SECONDS
    while not (noted.exists() and (text := noted.read_text(encoding="utf-8")).endswith("\n")):
        if child.poll() is not None or time.monotonic() > deadline:
            last = said.read_text(encoding="utf-8", errors="replace").splitlines()[-_NUM_LINES_OF_FAILURE:]
            raise RuntimeError("The run has no completion. It said:\n" + "\n".join(last))
        time.sleep(_LOOK_SECONDS)
    return float(text)
