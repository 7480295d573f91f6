"""A play: a service and its agents, killed as a seed has it, and started again.

The schedule (who is killed, where, how long after what) follows from the seed; what the machine does meanwhile does
not. What must be true afterwards is ``judge``.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from attrs import define, field, frozen
from tools.chaos.ledger import read_ledger
from tools.chaos.processes import ADMIN_KEY, ROOT, Child, Failed, Stages, marked, spawn, wait_for
from tools.chaos.stages import POINTS, Stage

__all__ = ["Outcome", "Profile", "free_port", "play", "settings"]

START_SECONDS = 180.0
IDLE_SECONDS = 8.0
TICK_SECONDS = 0.002
TRAP_SECONDS = 6.0
"""A trap that nobody has stepped into by then is replaced by a kill from outside."""


@frozen(kw_only=True)
class Profile:
    """How much of it. ``agent_kills`` are those for each kill of the service."""

    kills: int
    agents: int = 4
    batch_size: int = 4
    agent_kills: float = 1.9
    quiet_every: int = 12
    """Of so many lives of the service, one is long enough for what was left alone to expire."""
    more_steps: int = 2
    """Training goes on for so many steps after the last kill."""


@frozen(kw_only=True)
class Outcome:
    """What was done. The evidence lies in ``directory``."""

    directory: Path
    seed: int
    kills: Counter[str]
    stages: Counter[str]
    traps: Counter[str]
    lives: int
    summary: dict[str, Any]
    problems: tuple[str, ...] = ()
    seconds: float = 0.0
    start_seconds: tuple[float, ...] = ()
    """From the start of each life until it served."""


@define
class _Fate:
    """How one life of the service ends."""

    trap: str | None
    after: float
    is_starting: bool
    """``after`` counts from the start of the process, rather than from its first answer."""


@define
class _Play:
    directory: Path
    seed: int
    profile: Profile
    port: int
    random: random.Random
    stages: Stages
    life: int = 0
    service: Child | None = None
    agents: dict[int, Child] = field(factory=dict)
    agent_kills: list[float] = field(factory=list)
    kills: Counter[str] = field(factory=Counter)
    seen: Counter[str] = field(factory=Counter)
    traps: Counter[str] = field(factory=Counter)
    problems: list[str] = field(factory=list)
    start_seconds: list[float] = field(factory=list)

    # ------------------------------------------------------------------------------------------- processes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def start_service(self, trap: str | None = None) -> Child:
        # One that was killed before it had made its directory has told nobody of itself.
        resume = ["--resume"] if (self.run_dir / "config.yaml").exists() else []
        arguments = ["serve", str(self.directory / "chaos.yaml"), "--run-dir", str(self.run_dir), *resume]
        variables = {"CHAOS_LIFE": str(self.life)} | ({"CHAOS_TRAP": trap} if trap else {})
        self.service = spawn(
            "service", ["-m", "tools.chaos.service", *arguments], directory=self.directory, variables=variables
        )
        return self.service

    def start_agent(self, number: int, *extra: str) -> None:
        ledger = self.directory / f"agent-{number}.ledger"
        arguments = ["-m", "tools.chaos.agent", "--url", self.url, "--ledger", str(ledger), *extra]
        variables = {"OPENAI_API_KEY": ADMIN_KEY}
        self.agents[number] = spawn(f"agent-{number}", arguments, directory=self.directory, variables=variables)

    def kill_somebody(self) -> None:
        """One of the agents that the service runs itself, sometimes, where there is one; else an external agent."""
        workers = self.workers() if self.random.random() < 0.3 else []
        if workers:
            with suppress(psutil.NoSuchProcess):
                self.random.choice(workers).kill()
                self.kills["worker"] += 1
                return
        self.kill_agent()

    def workers(self) -> list[psutil.Process]:
        """The processes that the service has started."""
        assert self.service is not None
        try:
            return list(psutil.Process(self.service.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def kill_agent(self) -> None:
        number = self.random.randrange(self.profile.agents)
        leaves = self.random.random() < 0.25
        if self.agents[number].kill():
            self.kills["agent"] += 1
        else:
            self.problems.append(f"agent {number} ended by itself:\n{self.agents[number].output_tail()}")
        self.start_agent(number, *(["--leave"] if leaves else []))

    # ----------------------------------------------------------------------------------------------- lives

    def draw_fate(self) -> _Fate:
        draw = self.random
        if self.life % self.profile.quiet_every == self.profile.quiet_every - 1:
            return _Fate(trap=None, after=IDLE_SECONDS + 3, is_starting=False)
        kind = draw.random()
        if kind < 0.12:
            return _Fate(trap=None, after=draw.uniform(0.01, 8.0), is_starting=True)
        if kind < 0.55:
            return _Fate(trap=None, after=0.001 + draw.expovariate(1.0), is_starting=False)
        trap = f"{draw.choice(POINTS)}:{draw.choice((1, 1, 1, 2, 3, 5))}"
        return _Fate(trap=trap, after=TRAP_SECONDS, is_starting=False)

    def live(self) -> None:
        """One life of the service, to its violent end."""
        fate = self.draw_fate()
        service = self.start_service(fate.trap)
        for _ in range(int(self.profile.agent_kills + self.random.random())):
            self.agent_kills.append(service.began + self.random.uniform(0.1, 10.0))
        due = service.began + fate.after if fate.is_starting else None
        is_measured = False
        while service.is_alive:
            now = time.monotonic()
            stages = self.stages.read(self.life)
            if not is_measured and Stage.SERVING in stages:
                is_measured = True
                self.start_seconds.append(now - service.began)
            if due is None and Stage.ANSWERING in stages:
                due = now + fate.after
            if due is not None and now >= due:
                break
            if now > service.began + START_SECONDS:
                raise Failed(f"life {self.life} of the service has answered nobody:\n{service.output_tail()}")
            self.kill_agents_that_are_due(now)
            time.sleep(TICK_SECONDS)
        self.end_life(service, trap=None if service.is_alive else fate.trap)

    def kill_agents_that_are_due(self, now: float) -> None:
        due = [when for when in self.agent_kills if when <= now]
        self.agent_kills = [when for when in self.agent_kills if when > now]
        for _ in due:
            self.kill_somebody()

    def end_life(self, service: Child, *, trap: str | None) -> None:
        """``trap``: which it stepped into, if it did."""
        service.kill()
        code = service.process.returncode
        if code != -signal.SIGKILL:
            raise Failed(f"life {self.life} of the service ended by itself ({code}):\n{service.output_tail()}")
        self.kills["service"] += 1
        stages = self.stages.read(self.life)
        self.seen.update({str(stage) for stage in stages} or {"python starts"})
        if trap is not None:
            self.traps[trap.partition(":")[0]] += 1
        self.expect_no_child()
        self.life += 1

    def expect_no_child(self) -> None:
        """Nothing of the service outlives it."""
        agents = {agent.process.pid for agent in self.agents.values()}

        def orphans() -> list[Any]:
            return [process for process in marked(self.directory) if process.pid not in agents]

        deadline = time.monotonic() + 10
        while (left := orphans()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.problems += [f"orphan of life {self.life}: {' '.join(process.cmdline())}" for process in left]

    # ------------------------------------------------------------------------------------------------- end

    def settle(self) -> dict[str, Any]:
        """The last life: training goes on, agents finish, what was left alone expires, Ctrl-C ends it."""
        service = self.start_service()
        first = self.wait_for_steps(service, 0)
        self.wait_for_steps(service, first + self.profile.more_steps)
        for number, agent in self.agents.items():
            agent.process.send_signal(signal.SIGTERM)
            if agent.wait(START_SECONDS):
                self.problems.append(f"agent {number} failed:\n{agent.output_tail()}")
        if any(line["kind"] == "left" for path in self.directory.glob("*.ledger") for line in read_ledger(path)):
            time.sleep(IDLE_SECONDS + 2)
        code = service.interrupt(signal.SIGINT, START_SECONDS)
        if code:
            self.problems.append(f"interrupted, the service left with {code}:\n{service.output_tail()}")
        self.agents.clear()
        self.expect_no_child()
        last = service.output_tail(1)
        return dict(json.loads(last)) if last.startswith("{") else {}

    def wait_for_steps(self, service: Child, num: int) -> int:
        """Wait until so many steps were made; returns how many."""

        def is_answering() -> bool:
            if not service.is_alive:
                raise Failed(f"the last life of the service ended by itself:\n{service.output_tail()}")
            return Stage.ANSWERING in self.stages.read(self.life)

        def steps() -> int:
            path = self.run_dir / "metrics.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            return int(json.loads(lines[-1])["step"]) if lines else 0

        wait_for(is_answering, START_SECONDS, "the last life's first answer")
        wait_for(lambda: is_answering() and steps() >= num, START_SECONDS, f"step {num}")
        return steps()


def play(directory: Path, *, seed: int, profile: Profile) -> Outcome:
    """Kill until it was enough, and let the rest end well. Raises ``Failed``. No process is left behind in any case."""
    started = time.monotonic()
    port = free_port()
    (directory / "chaos.yaml").write_text(
        json.dumps(settings(port, seed=seed, batch_size=profile.batch_size)), encoding="utf-8"
    )
    stages = Stages(directory)
    acting = _Play(directory, seed, profile, port, random.Random(seed), stages)
    try:
        for number in range(profile.agents):
            acting.start_agent(number)
        while acting.kills.total() < profile.kills:
            acting.live()
        summary = acting.settle()
    finally:
        for process in marked(directory):
            process.kill()
        stages.close()
    return Outcome(
        directory=directory,
        seed=seed,
        kills=acting.kills,
        stages=acting.seen,
        traps=acting.traps,
        lives=acting.life + 1,
        summary=summary,
        problems=tuple(acting.problems),
        seconds=time.monotonic() - started,
        start_seconds=tuple(acting.start_seconds),
    )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(port: int, *, seed: int, batch_size: int) -> dict[str, Any]:
    """A configuration in which much happens in a second. The journal keeps everything, so that it can be judged."""
    return {
        "experiment_name": "chaos",
        "model": "tiny",
        "seed": seed,
        "total_steps": 1_000_000,
        "batch_size": batch_size,
        "rollout": {
            "workflow": f"{Path(__file__).with_name('worker_agent.py')}:HeldOutAgent",
            "group_size": 1,
            "max_concurrent_rollouts": 512,
            "max_head_offpolicyness": 256,
            "openai": {"mode": "subprocess", "subproc_max_workers": 1},
        },
        "eval_dataset": {"python": f"{ROOT / 'examples' / 'tiny_agent.py'}:problems", "size": 2, "seed": 1000},
        "serve": {"group_timeout_seconds": 4.0},
        "engine": {"max_concurrent": 16, "max_length": 512},
        "trainer": {
            "advantages": {"normalisation": "reinforce_plus_plus"},
            "optimizer": {"learning_rate": 0.001, "num_warmup_steps": 1},
        },
        "checkpoint": {"every_steps": 2, "keep": 2},
        "sessions": {"lifetimes": {"idle_seconds": IDLE_SECONDS, "grace_seconds": 1.0}},
        "journal": {"retention_days": 1.0},
        "proxy": {"port": port, "admin_key": ADMIN_KEY},
        "logging": {"display": "plain", "trackers": []},
    }
