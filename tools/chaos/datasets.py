"""``python -m tools.chaos.datasets --kills 50``: kill a run over a dataset, and see that each group is trained once.

The whole run is killed with SIGKILL, from outside or by itself at a chosen point, and resumed with ``--resume=auto``.
``tools.chaos.placed`` kills the processes of a run whose roles are placed.
After each kill of the run, the groups in ``groups.sqlite`` are written down. At the end they are compared with the
steps that the witness saw in all processes:

* a group that was stored is trained with the sessions that it was stored with, once, in the steps that led to the last
  weights, or still waits; it is not sampled again, and neither is a finished member of a group that was running
* a step that is repeated has the same groups with the same tokens, and the same numbers in ``metrics.jsonl``
* no position is trained twice, and none is left out
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import click
import yaml
from attrs import define, field
from tools.chaos import service
from tools.chaos.judge import surviving
from tools.chaos.processes import Child, Failed, Stages, fork, spawn, wait_for
from tools.chaos.stages import DATASET_POINTS, Stage

from areal_actors.config import load_config, save_config
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.records import read_records
from areal_actors.domain import DataPosition, GroupQueued, Problem, StepLeased
from areal_actors.journal import SqliteJournal
from areal_actors.rollouts.group_journal import RestoredQueue, restore_queue
from areal_actors.run.directory import sampling_digest
from areal_actors.training.actor import parse_position
from areal_actors.training.stored_checkpoints import find_latest

LIFE_SECONDS = 120.0
"""The longest time until a process serves, or makes a step."""
MEAN_KILL_SECONDS, MAX_KILL_SECONDS = 1.2, 5.0
"""The time from then until it is killed, on the average and at most."""
TRAP_SECONDS = 6.0
"""How long a process may take to reach the point at which it kills itself, before it is killed from outside."""
SOURCES = ("tools", "command", "workflow")
Place = tuple[str, int]
TIMED = ("seconds", "per_second", "sampled_tokens")


@define
class Play:
    """One run with its kills. ``stored`` are the sessions of each stored group by its place, as first seen."""

    directory: Path
    seed: int
    random: random.Random
    stored: dict[Place, tuple[str, ...]] = field(factory=dict)
    members: dict[tuple[Place, int], str] = field(factory=dict)
    """The sessions of stored members of groups that were running, by place and member."""
    metrics: dict[int, dict[str, Any]] = field(factory=dict)
    problems: list[str] = field(factory=list)
    counts: Counter[str] = field(factory=Counter)
    num_lives: int = 0
    num_kills: int = 0
    is_forked: bool = False
    """Whether processes are copies of this one, which takes a third of the time of new ones."""

    def settings(self) -> dict[str, Any]:
        """Return the configuration of the run."""
        return settings(self.seed)

    @property
    def run_dir(self) -> RunDirectory:
        """Where the run is."""
        return RunDirectory(path=self.directory / "run")

    def start(self, trap: str | None = None) -> Child:
        """Begin the next process of the run."""
        arguments = ["train", str(self.directory / "run.yaml"), "--run-dir", str(self.run_dir.path), "--resume=auto"]
        variables = {"CHAOS_LIFE": str(self.num_lives)} | ({} if trap is None else {"CHAOS_TRAP": trap})
        self.num_lives += 1
        if not self.is_forked:
            module = ["-m", "tools.chaos.service", *arguments]
            return spawn("train", module, directory=self.directory, variables=variables)

        def run() -> None:
            sys.argv[1:] = arguments
            service.main()

        return fork("train", run, directory=self.directory, variables=variables)

    def kill_one(self, trap: str | None = None) -> None:
        """Start the run and kill it, at ``trap`` if that is given."""
        if trap is None and self.random.random() < 0.5:
            trap = f"{self.random.choice(DATASET_POINTS)}:{self.random.randint(1, 2)}"
        life = self.num_lives
        child = self.start(trap)
        stages = Stages(self.directory)
        try:
            # A run that serves has finished its start; one that is trapped may end before.
            wait_for(lambda: not child.is_alive or Stage.SERVING in stages.read(life), LIFE_SECONDS, "the run to serve")
            deadline = time.monotonic() + (self.draw_seconds() if trap is None else TRAP_SECONDS)
            while child.is_alive and time.monotonic() < deadline:
                time.sleep(0.01)
            if child.process.poll() not in (None, -signal.SIGKILL):
                raise Failed(f"The run ended by itself:\n{child.output_tail()}")
            for stage in stages.read(life):
                self.counts[f"killed while {stage}"] += 1
            self.note_kill("itself" if not child.kill() else "the run, from outside")
        finally:
            child.kill()
            stages.close()

    def draw_seconds(self) -> float:
        """Draw how long a process that serves lives on."""
        return min(self.random.expovariate(1 / MEAN_KILL_SECONDS), MAX_KILL_SECONDS)

    def note_kill(self, what: str) -> None:
        """Count a kill."""
        self.num_kills += 1
        self.counts[f"killed: {what}"] += 1

    def take_stock(self) -> RestoredQueue:
        """Write down what the killed run left, and compare it with what was left before."""
        if not self.run_dir.groups.exists():
            return RestoredQueue()
        restored = anyio.run(self._read)
        for part in restored.parts:
            for episode in part.group.episodes:
                known = self.members.setdefault((part.group.problem.place, episode.member), episode.session)
                if known != episode.session:
                    self.problems.append(f"sampled again: member {episode.member} of {part.group.id}")
        self.counts["members found finished"] += len(restored.parts)
        for entry in restored.held:
            sessions = tuple(episode.session for episode in entry.group.episodes)
            if self.stored.setdefault(entry.group.problem.place, sessions) != sessions:
                self.problems.append(f"sampled again: {entry.group.id}")
        self.counts["groups found waiting"] += len(restored.waiting)
        self.counts["steps found recorded"] += len(restored.steps)
        for record in read_records(self.run_dir.metrics):
            numbers = {key: value for key, value in record.items() if not key.endswith(TIMED) and key != "engines"}
            before = self.metrics.setdefault(record["step"], numbers)
            # An evaluation may have been cut off.
            if [key for key in numbers if numbers[key] != before[key] and not key.startswith("eval")]:
                self.problems.append(f"step {record['step']} has other numbers than before: {numbers} != {before}")
        return restored

    async def _read(self) -> RestoredQueue:
        found = find_latest(self.run_dir.checkpoints)
        position = DataPosition() if found is None else parse_position(found.counters["caller"])
        async with SqliteJournal.open(self.run_dir.groups) as journal:
            events = [event async for event in journal.read()]
        config = load_config(self.run_dir.config)
        is_consumed = config.queue.open_draws(position).is_consumed
        restored = restore_queue(
            events,
            settings=sampling_digest(self.run_dir.config),
            version=0 if found is None else found.step,
            is_done=is_consumed,
        )
        # Groups of the checkpoint are discarded if the run was killed before they were deleted; nothing else is.
        for event in restored.void:
            is_lost = isinstance(event, StepLeased)
            if isinstance(event, GroupQueued):
                source = event.group.split("-")[1]
                is_lost = not is_consumed(Problem(position=event.position, source=source, data={}))
            if is_lost:
                self.problems.append(f"discarded by the resume: {event}")
        return restored

    def finish(self, num_steps: int = 3) -> None:
        """Let the run make some steps, and stop it as a user would."""
        child = self.start()
        try:
            # From the file: a controller that was never killed has made steps since the last look.
            newest = max((record["step"] for record in read_records(self.run_dir.metrics)), default=0)
            wait_for(
                lambda: (
                    not child.is_alive
                    or any(r["step"] >= newest + num_steps for r in read_records(self.run_dir.metrics))
                ),
                LIFE_SECONDS,
                "further steps",
            )
            if child.interrupt(signal.SIGINT, LIFE_SECONDS) != 0:
                raise Failed(f"The last process failed:\n{child.output_tail()}")
        finally:
            child.kill()

    def judge(self, waiting: RestoredQueue) -> None:
        """Compare the steps of all processes with one another, and with what was stored."""
        steps = self._compare_steps()
        trained: dict[Place, Mapping[str, Any]] = {}
        self.counts["groups trained twice"] = self.counts["groups stored and never trained"] = 0
        for group in (group for step in steps for group in step["groups"]):
            place = group["source"], group["position"]
            if place in trained:
                self.counts["groups trained twice"] += 1
                self.problems.append(f"trained twice: {group['group']}")
            trained[place] = group
        held = {entry.group.problem.place for entry in waiting.held}
        for place in self.stored.keys() - trained.keys() - held:
            self.counts["groups stored and never trained"] += 1
            self.problems.append(f"lost: {place}")
        for place, group in trained.items():
            for episode in group["episodes"]:
                member = self.members.get((place, episode["member"]), episode["session"])
                if member != episode["session"] or episode["session"] not in self.stored.get(place, (member,)):
                    self.problems.append(f"sampled again: member {episode['member']} of {group['group']}")
        failed = {_place(record["task_id"]) for record in read_records(self.run_dir.failures)}
        self.counts["groups trained"], self.counts["groups that failed"] = len(trained), len(failed)
        over = {*trained, *failed}
        for source in SOURCES:
            last = max((position for name, position in trained if name == source), default=0)
            missing = [position for position in range(last) if (source, position) not in over]
            if len(missing) > 16:  # what may run at once
                self.problems.append(f"left out: positions {missing} of {source}")
        numbers = [record["step"] for record in read_records(self.run_dir.metrics)]
        if numbers != list(range(1, len(numbers) + 1)):
            self.problems.append(f"metrics.jsonl has the steps {numbers}")

    def _compare_steps(self) -> list[Mapping[str, Any]]:
        """Return the steps that led to the last weights."""
        events = [json.loads(line) for line in (self.directory / "steps.jsonl").read_text("utf-8").splitlines()]
        seen: dict[int, Any] = {}
        for event in events:
            if event["event"] == "trained":
                self.counts["steps made"] += 1
                if seen.setdefault(event["version"], event["groups"]) != event["groups"]:
                    self.problems.append(f"step {event['version']} was repeated with other groups or tokens")
        steps = surviving(events)
        self.counts["steps that led to the last weights"] = len(steps)
        return steps


def _place(task: str) -> Place:
    source, _, position = task.rpartition("-")
    return source, int(position)


def settings(seed: int) -> dict[str, Any]:
    """A configuration in which many groups wait, and checkpoints are rare."""
    agent = Path(__file__).with_name("tool_agent.py")
    return {
        "experiment_name": "chaos",
        "model": "tiny",
        "seed": seed,
        "total_steps": 100_000,
        "batch_size": 3,
        "sources": {
            "tools": {
                "dataset": {"python": f"{agent}:problems", "size": 500, "seed": 0},
                "workflow": f"{agent}:ToolAgent",
                "weight": 2,
            },
            "command": {
                "dataset": {"python": f"{agent}:problems", "size": 500, "seed": 1000},
                "workflow": {"command": [sys.executable, str(agent.with_name("command_agent.py"))]},
            },
            "workflow": {
                "dataset": {"python": f"{agent}:problems", "size": 500, "seed": 2000},
                "workflow": f"{agent}:ToolWorkflow",
            },
        },
        "rollout": {"group_size": 3, "max_concurrent_rollouts": 16, "max_head_offpolicyness": 2},
        "engine": {"max_concurrent": 32, "max_length": 256, "dtype": "float32"},
        "trainer": {"dtype": "float32", "optimizer": {"learning_rate": 0.001, "num_warmup_steps": 1}},
        "checkpoint": {"every_steps": 4},
        "logging": {"display": "plain", "trackers": []},
    }


def play(running: Play, *, kills: int, minutes: float) -> None:
    """Kill the run so often, or for so long, let it go on, and judge it. Raises ``Failed`` if it ends by itself."""
    (running.directory / "run.yaml").write_text(yaml.safe_dump(running.settings()), encoding="utf-8")
    if running.is_forked:
        _import_all(running.directory)
    deadline = time.monotonic() + 60 * minutes
    while running.num_kills < kills and time.monotonic() < deadline:
        running.kill_one()
        running.take_stock()
    running.finish()
    running.judge(running.take_stock())


def _import_all(directory: Path) -> None:
    """Import what a run imports, and read and write its configuration once, before this process is copied."""
    for name in ("run.training", "run.openers", "training.trainer", "training.actor", "generation.torch.engine"):
        importlib.import_module(f"areal_actors.{name}")
    for name in ("areal_actors.cli.commands", "areal_actors.proxy.app", "hypercorn.asyncio.run", "hypercorn.protocol"):
        importlib.import_module(name)
    for name in ("transformers", "openai", "tools.chaos.tool_agent"):
        importlib.import_module(name)
    save_config(load_config(directory / "run.yaml"), directory / "saved.yaml")


def _lines(played: Play) -> Iterator[str]:
    yield f"\n{played.num_kills} kills of {played.num_lives} processes of the run"
    yield from (f"  {name:<40}{number:>8}" for name, number in sorted(played.counts.items()))


def main(kind: type[Play] = Play) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {kind.__module__}")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long, whatever was killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fork", action="store_true", help="copy this process for each one: faster, and less real")
    parser.add_argument("--json", type=Path, help="append the counts to this file, as a line")
    parser.add_argument("--directory", type=Path, help="where everything is written down, and kept")
    options = parser.parse_args()
    directory = (options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    click.echo(f"{options.kills} kills, seed {options.seed}, in {directory}")
    running = kind(directory, options.seed, random.Random(options.seed))
    running.is_forked = options.fork
    began = time.monotonic()
    try:
        play(running, kills=options.kills, minutes=options.minutes)
    except Failed as error:
        running.problems.append(str(error))
    click.echo("\n".join(_lines(running)))
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_record(running, time.monotonic() - began)) + "\n")
    if running.problems:
        click.echo("\n  ".join((f"\n{len(running.problems)} things are wrong:", *running.problems[:50])))
        return 1
    if options.directory is None:
        shutil.rmtree(directory)
    return 0


def _record(played: Play, seconds: float) -> dict[str, Any]:
    return {
        "play": played.__module__.rpartition(".")[2] if played.__module__ != "__main__" else Path(sys.argv[0]).stem,
        "seed": played.seed,
        "is_forked": played.is_forked,
        "kills": played.num_kills,
        "seconds": round(seconds),
        "counts": dict(sorted(played.counts.items())),
        "problems": played.problems,
    }


if __name__ == "__main__":
    sys.exit(main())
