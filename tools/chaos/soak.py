"""``python -m tools.chaos.soak serve --minutes 10``: whether the memory of a long run stays where it is.

``serve`` is asked by ten external agents, which are started and stopped (politely, or killed) at random all the while;
``train`` runs the tiny job over its dataset. The resident memory of the process is sampled, a line is fitted to what
follows the warm-up, and both are written to ``soak-<command>.json`` and drawn in ``soak-<command>.svg`` and ``.png``.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from attrs import asdict, define, field, frozen
from tools.chaos.play import free_port, settings
from tools.chaos.processes import ADMIN_KEY, ROOT, Child, Failed, marked, spawn, wait_for

NUM_AGENTS = 10
SAMPLE_SECONDS = 2.0
MEAN_SECONDS = 15.0
"""How long an agent lives, on the average."""
WARM_UP = 0.3
"""The share of the time in which caches and heaps grow to their size."""
MEGABYTE = 2**20


@frozen(kw_only=True)
class Soak:
    """Memory over time. ``slope`` is in megabytes a minute, after ``warm_up`` seconds."""

    command: str
    seconds: tuple[float, ...]
    megabytes: tuple[float, ...]
    warm_up: float
    steps: int
    agents_started: int = 0

    @property
    def slope(self) -> float:
        """Of the line through what follows the warm-up, by least squares."""
        after = [index for index, second in enumerate(self.seconds) if second >= self.warm_up]
        minutes = np.array([self.seconds[index] / 60 for index in after])
        return float(np.polyfit(minutes, [self.megabytes[index] for index in after], 1)[0])


@define
class _Crowd:
    """Agents that come and go."""

    directory: Path
    url: str
    random: random.Random
    agents: dict[int, tuple[Child, float]] = field(factory=dict)
    num_started: int = 0

    def move(self, now: float) -> None:
        """Start whom there is room for, and stop whose time has come."""
        for number in range(NUM_AGENTS):
            child, end = self.agents.get(number, (None, 0.0))
            if child is None or not child.is_alive:
                self.agents[number] = (self._start(number), now + self.random.expovariate(1 / MEAN_SECONDS))
            elif now >= end:
                child.process.send_signal(self.random.choice((signal.SIGTERM, signal.SIGKILL)))

    def _start(self, number: int) -> Child:
        self.num_started += 1
        ledger = self.directory / f"agent-{number}.ledger"
        arguments = ["-m", "tools.chaos.agent", "--url", self.url, "--ledger", str(ledger)]
        arguments += ["--leave"] if self.random.random() < 0.25 else []
        return spawn(f"agent-{number}", arguments, directory=self.directory, variables={"OPENAI_API_KEY": ADMIN_KEY})


def soak_serve(directory: Path, minutes: float, seed: int) -> Soak:
    """Serve agents that come and go. Raises ``Failed``."""
    port = free_port()
    config = settings(port, seed=seed, batch_size=8) | {"journal": {}}
    (directory / "soak.yaml").write_text(json.dumps(config), encoding="utf-8")
    service = _start(directory, "serve", str(directory / "soak.yaml"))
    key = directory / "run" / "admin.key"
    wait_for(lambda: key.exists() or not service.is_alive, 120, "the service")
    crowd = _Crowd(directory, f"http://127.0.0.1:{port}", random.Random(seed))
    return _soak("serve", service, minutes, move=crowd.move, num_started=lambda: crowd.num_started)


def soak_train(directory: Path, minutes: float, seed: int) -> Soak:
    """Train the tiny job for so long. Raises ``Failed``."""
    overrides = [f"seed={seed}", "total_steps=1000000", "logging.trackers=[]", "logging.display=plain"]
    service = _start(directory, "train", str(ROOT / "examples" / "tiny.yaml"), *overrides)
    return _soak("train", service, minutes, move=lambda _now: None, num_started=lambda: 0)


def _start(directory: Path, *arguments: str) -> Child:
    command = ["-m", "areal_actors", *arguments, "--run-dir", str(directory / "run")]
    return spawn("service", command, directory=directory, variables={})


def _soak(
    command: str, service: Child, minutes: float, *, move: Callable[[float], None], num_started: Callable[[], int]
) -> Soak:
    process = psutil.Process(service.process.pid)
    began = time.monotonic()
    seconds: list[float] = []
    megabytes: list[float] = []
    while (now := time.monotonic()) < began + 60 * minutes:
        if not service.is_alive:
            raise Failed(f"{command} ended by itself:\n{service.output_tail()}")
        move(now)
        seconds.append(round(now - began, 2))
        megabytes.append(round(process.memory_info().rss / MEGABYTE, 2))
        time.sleep(SAMPLE_SECONDS)
    code = service.interrupt(signal.SIGINT, 120)
    if code:
        raise Failed(f"{command} left with {code}:\n{service.output_tail()}")
    steps = json.loads(service.output_tail(1))["steps"]
    return Soak(
        command=command,
        seconds=tuple(seconds),
        megabytes=tuple(megabytes),
        warm_up=60 * minutes * WARM_UP,
        steps=steps,
        agents_started=num_started(),
    )


def draw(soak: Soak, path: Path) -> None:
    """The curve as a picture, in the form that the name of ``path`` says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(f"{soak.command}: {soak.slope:+.2f} MB a minute after the warm-up", fontsize=11, loc="left")
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory in MB")
    axes.set_ylim(0, 1.15 * max(soak.megabytes))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.plot([second / 60 for second in soak.seconds], soak.megabytes, color="#3b7dd8", linewidth=1.6)
    axes.axvline(soak.warm_up / 60, color="#888888", linewidth=0.8, linestyle="--")
    figure.savefig(path, dpi=144)


def write(soak: Soak, directory: Path) -> None:
    """The numbers and both pictures."""
    document: dict[str, Any] = asdict(soak) | {"megabytes_per_minute": round(soak.slope, 3)}
    (directory / f"soak-{soak.command}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    for form in ("svg", "png"):
        draw(soak, directory / f"soak-{soak.command}.{form}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos.soak", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("command", choices=("serve", "train"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(), help="where the curve is written")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        directory = Path(name)
        try:
            run = soak_serve if options.command == "serve" else soak_train
            soak = run(directory, options.minutes, options.seed)
        finally:
            for process in marked(directory):
                process.kill()
    options.output.mkdir(parents=True, exist_ok=True)
    write(soak, options.output)
    click.echo(
        f"{soak.command}: {soak.steps} steps, {soak.agents_started} agents started; {soak.megabytes[0]:.0f} to "
        f"{soak.megabytes[-1]:.0f} MB, {soak.slope:+.2f} MB a minute after {soak.warm_up:.0f} s."
    )


if __name__ == "__main__":
    main()
