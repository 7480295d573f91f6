"""``python -m tools.chaos.placed --kills 50``: kill the processes of a run over a dataset whose roles are placed.

Each role is in a worker, the engine in two. One process after the other is killed: a worker, from outside or by itself
at a chosen point, or the controller. A worker is replaced; after the death of the controller, the run is resumed, and
none of its processes may be left. What must be true afterwards is that of ``tools.chaos.datasets``.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define
from tools.chaos.datasets import TRAP_SECONDS, Play, main
from tools.chaos.processes import Child, Failed, marked
from tools.chaos.stages import DATASET_POINTS
from tools.chaos.witnessed_worker import WITNESSES
from tools.placement.play import workers_of

from areal_actors.lib.locks import is_held
from areal_actors.rollouts.group_journal import RestoredQueue

START_SECONDS = 300.0
"""The longest time until all workers serve; six at once import for minutes on a busy machine."""
SAMPLE_SECONDS = 60.0
"""The longest time that a kill waits for a sample."""
CLEAN_SECONDS = 20.0
"""The longest time until the processes of a run have ended after its controller was killed."""
CONTROLLER = "controller"
WORKERS = ("proxy-0", "sessions-0", "generation-0", "generation-1", "trainer-0", "rollout-0")
TRAPS = {
    "sessions-0": [point for point in DATASET_POINTS if " " in point or point.startswith("restor")],
    "trainer-0": [point for point in DATASET_POINTS if point.startswith(("trained", "checkpoint"))],
}
"""The points at which a worker can kill itself."""


@define
class PlacedPlay(Play):
    """A run with one process for each role. ``trapped`` is the worker that is going to kill itself."""

    controller: Child | None = None
    trapped: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the configuration of the run, in which workers have a witness."""
        roles: dict[str, dict[str, Any]] = {name.rpartition("-")[0]: {} for name in WORKERS}
        roles["generation"]["replicas"] = 2
        for role in WITNESSES:
            python = self.directory / f"python-{role}"
            # In place of "python -m areal_actors.worker".
            python.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tools.chaos.witnessed_worker {role}\n")
            python.chmod(0o755)
            roles[role]["python"] = str(python)
        local = {"oversubscribe": True}
        scheduler = {"type": "local", "roles": roles, "local": local, "restarts": {"max": 1_000_000}}
        return super().settings() | {"scheduler": scheduler}

    @property
    def trap(self) -> Path:
        """The file that names the point at which a worker kills itself. The worker removes it."""
        return self.directory / "trap"

    def kill_one(self, trap: str | None = None) -> None:
        """Kill one process of the run, which is started if it does not run; ``trap`` is not used."""
        if self.controller is None:
            self.controller = self.start()
        controller = self.controller
        # Sometimes, a process is killed while others start.
        num_workers = len(WORKERS) if self.random.random() < 0.75 else self.random.randint(1, len(WORKERS))
        try:
            self._wait(lambda: len(self._workers()) >= num_workers, START_SECONDS, f"{num_workers} workers")
            if self.trapped is not None:
                with suppress(TimeoutError):
                    self._wait(lambda: not self.trap.exists(), TRAP_SECONDS)
                trapped, self.trapped = self.trapped, None
                if not self.trap.exists():
                    self.note_kill(f"{trapped}, by itself")
                    return
                self.trap.unlink(missing_ok=True)
            with suppress(TimeoutError):
                # Mostly while something is sampled: processes start for much longer than episodes take.
                if self.random.random() < 0.75:
                    num_samples = self._count_samples()
                    self._wait(lambda: self._count_samples() > num_samples, SAMPLE_SECONDS)
                self._wait(lambda: False, self.draw_seconds())
            self._kill(self.random.choice([*sorted(self._workers()), CONTROLLER]), controller)
        except BaseException:
            controller.kill()
            raise

    def _wait(self, is_true: Any, seconds: float, what: str | None = None) -> None:
        """Wait while the run runs. Raises ``Failed`` if it ends; after the time too, or ``TimeoutError``."""
        assert self.controller is not None
        deadline = time.monotonic() + seconds
        while not is_true():
            if not self.controller.is_alive:
                raise Failed(f"The run ended by itself:\n{self.controller.output_tail()}")
            if time.monotonic() > deadline:
                if what is None:
                    raise TimeoutError
                log = (self.run_dir.path / "logs" / "run.jsonl").read_text("utf-8")[-3000:]
                raise Failed(f"waited {seconds:g} s for {what}:\n{self.controller.output_tail()}\n{log}")
            time.sleep(0.02)

    def _count_samples(self) -> int:
        """Return the number of lines that the witness has written about samples."""
        path = self.directory / "samples.jsonl"
        return path.read_text("utf-8").count('["train"') if path.exists() else 0

    def _workers(self) -> dict[str, int]:
        return {name: pid for name, pid in workers_of(self.run_dir.path).items() if name in WORKERS}

    def _kill(self, victim: str, controller: Child) -> None:
        trapped = self.random.choice(sorted(TRAPS))
        # A point is read when a process starts.
        if self.random.random() < 0.3 and victim in (trapped, CONTROLLER):
            self.trapped = trapped
            self.trap.write_text(f"{self.random.choice(TRAPS[trapped])}:{self.random.randint(1, 2)}", encoding="utf-8")
        if victim == CONTROLLER:
            controller.kill()
            self.controller = None
            deadline = time.monotonic() + CLEAN_SECONDS
            lock = self.run_dir.groups.with_name(f"{self.run_dir.groups.name}.lock")
            # A process that ends has no environment any more, by which it is found, while it still has its locks.
            while ((left := list(marked(self.directory))) or is_held(lock)) and time.monotonic() < deadline:
                time.sleep(0.05)
            for process in left:
                self.problems.append(f"left by the controller: {' '.join(process.cmdline())}")
                process.kill()
        else:
            with suppress(ProcessLookupError, KeyError):
                os.kill(self._workers()[victim], signal.SIGKILL)
        self.note_kill(victim)

    def take_stock(self) -> RestoredQueue:
        """Compare what a killed run left with what was left before, if it does not run."""
        return super().take_stock() if self.controller is None else RestoredQueue()

    def start(self, trap: str | None = None) -> Child:
        """Return the controller that runs, or start one."""
        return self.controller or super().start(trap)

    def finish(self, num_steps: int = 3) -> None:
        """Let the run make some steps, and stop it as a user would."""
        self.trap.unlink(missing_ok=True)
        super().finish(num_steps)
        self.controller = None


if __name__ == "__main__":
    sys.exit(main(PlacedPlay))
