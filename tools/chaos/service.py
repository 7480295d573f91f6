"""``areal-actors`` with a witness in its process, which says what it was doing, and may kill it at a chosen point.

``python -m tools.chaos.service serve CONFIG …``. The program is the ordinary one; a few of its functions are wrapped:

* each training step is written down (``steps.jsonl``) with what it was made of, before anything can follow from it;
* ``stage`` says what the process is doing, for whoever kills it from outside and counts;
* at the point named by ``CHAOS_TRAP`` (``<point>:<times>``), the process kills itself with SIGKILL.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tools.chaos.stages import DATASET_POINTS, POINTS, Point, Stage

KINDS = {
    "SessionStarted": Point.START,
    "TurnEnded": Point.TURN,
    "RewardSet": Point.REWARD,
    "SessionEnded": Point.END,
    "SessionForgotten": Point.FORGET,
    "GroupQueued": Point.QUEUE,
    "StepLeased": Point.LEASE,
    "GroupConsumed": Point.CONSUME,
    "VersionSaved": Point.SAVE,
}


class Witness:
    """Keeps the record of one life of the service."""

    def __init__(
        self,
        directory: Path,
        *,
        life: int,
        trap: str | None = None,
        trap_file: Path | None = None,
        stage: Path | None = None,
    ) -> None:
        self._steps = os.open(directory / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._samples = os.open(directory / "samples.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._stage = os.open(stage or directory / "stage", os.O_WRONLY | os.O_CREAT, 0o644)
        self._life = life
        self._trap_file = trap_file
        if trap_file is not None and trap_file.exists():
            trap = trap_file.read_text("utf-8")
        name, _, times = (trap or "").partition(":")
        self._trap, self._times = name, int(times or 0)
        self._lock = threading.Lock()
        self._stages: set[Stage] = set()

    def enter(self, stage: Stage) -> None:
        """The process does this, too."""
        self._change(lambda stages: stages.add(stage))

    def leave(self, stage: Stage) -> None:
        """The process does this no longer."""
        self._change(lambda stages: stages.discard(stage))

    def _change(self, change: Callable[[set[Stage]], None]) -> None:
        with self._lock:
            change(self._stages)
            text = f"{self._life} {' '.join(sorted(self._stages))}"
            os.pwrite(self._stage, text.ljust(200).encode(), 0)

    def reach(self, point: Point | str) -> None:
        """Die here, if this is where."""
        if self._trap != point:
            return
        with self._lock:
            self._times -= 1
            if self._times <= 0:
                if self._trap_file is not None:
                    if not self._trap_file.exists():
                        return
                    self._trap_file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    def note(self, event: str, **what: Any) -> None:
        """Write down what happened to the weights."""
        line = json.dumps({"life": self._life, "event": event, **what}) + "\n"
        os.write(self._steps, line.encode())

    def note_sample(self, event: str, **what: Any) -> None:
        """Write down that the engine was asked for a sample."""
        line = json.dumps({"life": self._life, "event": event, **what}) + "\n"
        os.write(self._samples, line.encode())


def install(witness: Witness) -> None:
    """Wrap what is to be witnessed. The first import of anything heavy happens here."""
    witness.enter(Stage.LOADING)
    witness_journal(witness)
    witness_sampling(witness)
    witness_training(witness)


def witness_journal(witness: Witness) -> None:
    """Wrap the start of sessions, and their journal."""
    from areal_actors.journal.sqlite import Store

    _wrap_start(witness)
    _wrap_journal(witness, Store)


def witness_sampling(witness: Witness) -> None:
    """Wrap the engine."""
    from areal_actors.generation.torch.engine import TorchEngine

    _wrap_engine(witness, TorchEngine)


def witness_training(witness: Witness) -> None:
    """Wrap the trainer and its checkpoints."""
    from areal_actors.lib import atomic_write
    from areal_actors.training import checkpoints
    from areal_actors.training.trainer import PolicyTrainer

    _wrap_trainer(witness, PolicyTrainer)
    _before(witness, checkpoints, "write_tensors", Point.CHECKPOINT_PART)
    _wrap_install(witness, atomic_write)


def _before(witness: Witness, module: Any, name: str, point: Point) -> None:
    inner = getattr(module, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        witness.reach(point)
        return inner(*args, **kwargs)

    setattr(module, name, wrapped)


def _wrap_install(witness: Witness, atomic_write: Any) -> None:
    """A directory is synced last, after its files and before it gets its name."""
    sync = atomic_write.sync_path

    def syncing(path: Path) -> None:
        sync(path)
        if path.name.endswith(".partial"):
            witness.reach(Point.CHECKPOINT_INSTALL)

    atomic_write.sync_path = syncing


def _wrap_start(witness: Witness) -> None:
    from areal_actors.run import openers

    name = "spawn_session_actors"
    spawn = getattr(openers, name)

    async def spawning(*args: Any, **kwargs: Any) -> Any:
        witness.leave(Stage.LOADING)
        witness.enter(Stage.RESTORING)
        witness.reach(Point.RESTORING)
        actors = await spawn(*args, **kwargs)
        witness.reach(Point.RESTORED)
        witness.leave(Stage.RESTORING)
        witness.enter(Stage.SERVING)
        return actors

    setattr(openers, name, spawning)


def _wrap_engine(witness: Witness, engine: Any) -> None:
    inner = engine.generate

    def generating(self: Any, request: Any) -> Any:
        witness.note_sample("sampled", id=request.id, key=request.key.path, num_drawn=request.key.num_drawn)
        return inner(self, request)

    engine.generate = generating


def _wrap_journal(witness: Witness, store: Any) -> None:
    write = store.write

    def writing(self: Any, facts: Sequence[Any]) -> None:
        kinds = sorted({KINDS[name] for fact in facts if (name := type(fact).__name__) in KINDS})
        witness.enter(Stage.COMMITTING)
        for kind in kinds:
            witness.reach(f"before {kind}")
        write(self, facts)
        for kind in kinds:
            witness.reach(f"after {kind}")
        witness.leave(Stage.COMMITTING)
        if Point.TURN in kinds:
            witness.enter(Stage.ANSWERING)

    store.write = writing


def _wrap_trainer(witness: Witness, trainer: Any) -> None:
    train_step, save, restore = trainer.train_step, trainer.save, trainer.restore

    def training(self: Any, groups: Sequence[Any], **kwargs: Any) -> Any:
        witness.leave(Stage.TRAINED)
        witness.enter(Stage.TRAINING)
        statistics = train_step(self, groups, **kwargs)
        witness.note("trained", version=self.version, groups=[_describe(group) for group in groups])
        witness.enter(Stage.TRAINED)
        witness.leave(Stage.TRAINING)
        witness.reach(Point.TRAINED)
        return statistics

    def saving(self: Any, *args: Any, **kwargs: Any) -> Any:
        witness.enter(Stage.SAVING)
        saved = save(self, *args, **kwargs)
        witness.reach(Point.CHECKPOINT_WRITTEN)
        witness.leave(Stage.SAVING)
        return saved

    def restoring(self: Any, *args: Any, **kwargs: Any) -> Any:
        counters = restore(self, *args, **kwargs)
        witness.note("restored", version=self.version)
        return counters

    trainer.train_step, trainer.save, trainer.restore = training, saving, restoring


def _describe(group: Any) -> dict[str, Any]:
    episodes = [_describe_episode(episode) for episode in group.episodes if episode.failure is None]
    place = {"source": group.problem.source, "position": group.problem.position}
    return {"group": group.id, **place, "episodes": episodes}


def _describe_episode(episode: Any) -> dict[str, Any]:
    """The digest of the tokens that each interaction sampled, as the rows of the step have them."""
    sampled: dict[str, str] = {}
    for row in episode.trajectories:
        for index, name in enumerate(row.interactions):
            tokens = row.input_ids[row.turns == index]
            sampled[name] = blake2b(tokens.astype("<i4").tobytes(), digest_size=8).hexdigest()
    return {
        "session": episode.session,
        "member": episode.member,
        "reward": episode.reward,
        "num_rows": len(episode.trajectories),
        "sampled": sampled,
        "untrained": [left.interaction for left in episode.untrained],
    }


def main() -> None:
    """Run the command line under the witness."""
    trap = os.environ.get("CHAOS_TRAP")
    assert trap is None or trap.partition(":")[0] in (*POINTS, *DATASET_POINTS)
    witness = Witness(Path(os.environ["CHAOS_DIRECTORY"]), life=int(os.environ["CHAOS_LIFE"]), trap=trap)
    install(witness)
    from areal_actors.cli import cli

    cli(prog_name="areal-actors")


if __name__ == "__main__":
    main()
