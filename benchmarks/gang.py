"""What a second process costs and saves: one training step by one process, and by a gang of two on the same machine.

Both take the step of ``benchmarks.trainer`` on the same random model, with passes small enough for two processes to
share. ``s/step`` are seconds on the clock, ``cpu-s/step`` those of all processes: their ratio is what gathering weights
and adding up gradients costs. Nothing is gated: a gang is for models that do not fit one device, and for machines that
this one is not.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attrs import evolve
from benchmarks.harness import Result
from benchmarks.trainer import create_group, create_model

from areal_actors.domain import Group
from areal_actors.training.config import ComputeDtype, GangBackend, GangConfig, Layout, TrainerConfig
from areal_actors.training.gang import Gang, connect_store, open_store
from areal_actors.training.trainer import PolicyTrainer

ROOT = Path(__file__).parents[1]
NUM_GROUPS = 2
GANG = GangConfig(num_processes=2, backend=GangBackend.GLOO, timeout_seconds=120.0)


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Seconds of a step on the clock and of CPU, and how many times those of one process a gang needs."""
    rounds = 2 if quick else 5
    alone = _measure(_step(Gang.alone()), rounds)
    store = open_store("127.0.0.1", GANG)
    command = [sys.executable, "-c", f"from benchmarks.gang import follow; follow({store.port}, {rounds})"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        gang = Gang.form(store, rank=0, config=GANG)
        try:
            together = _measure(_step(gang), rounds)
        finally:
            gang.close()
        output, _ = other.communicate(timeout=60)
    costs = {
        "s/step": (alone[0], together[0]),
        "cpu-s/step": (alone[1], together[1] + float(output.split()[-1])),
    }
    return [result for unit, (one, two) in costs.items() for result in _results(unit, one, two)]


def _results(unit: str, one: float, two: float) -> list[Result]:
    names = f"one process, {unit}", f"two processes, {unit}"
    return [
        Result(benchmark="gang", name=names[0], value=one, unit=unit),
        Result(benchmark="gang", name=names[1], value=two, unit=unit),
        Result(benchmark="gang", name=f"two over one, {unit}", value=two / one, unit="ratio", baseline=names[0]),
    ]


def follow(port: int, rounds: int) -> None:
    """Rank 1: the same steps. Prints its CPU seconds of one."""
    gang = Gang.form(connect_store("127.0.0.1", port, GANG), rank=1, config=GANG)
    try:
        print(_measure(_step(gang), rounds)[1])
    finally:
        gang.close()


def _step(gang: Gang) -> Callable[[], object]:
    config = TrainerConfig(layout=Layout.FLAT, dtype=ComputeDtype.FLOAT32, max_packed_tokens=1400, gang=GANG)
    trainer = PolicyTrainer(create_model(), config)
    if not gang.is_alone:
        trainer.join(gang)
    group = create_group(vocab_size=trainer.model.config.vocab_size)
    return partial(trainer.train_step, _copies(group))


def _copies(group: Group) -> list[Group]:
    return [evolve(group) for _ in range(NUM_GROUPS)]


def _measure(step: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Seconds on the clock and of CPU of this process: the least of some rounds each, after one that warms up."""
    step()
    found = []
    for _ in range(rounds):
        clock, cpu = time.perf_counter(), time.process_time()
        step()
        found.append((time.perf_counter() - clock, time.process_time() - cpu))
    return min(clock for clock, _ in found), min(cpu for _, cpu in found)
