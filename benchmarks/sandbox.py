"""Sandboxes: how long a box takes, and what 1,000 episodes leave behind.

``python -m benchmarks.sandbox [--episodes 1000] [--backend bubblewrap]``. The episodes go through ``CommandAgent`` with
a grader, eight at a time: they answer, crash, hang, flood stdout, fill the disk, take memory, fork, and leave daemons.

On a machine that has other work, times on the clock are mostly those of its scheduler. ``chrt --rr 1 python -m
benchmarks.sandbox --episodes 0`` measures starts with priority over all of that (a few seconds, as root).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import anyio
import psutil

from areal_actors.errors import EpisodeError
from areal_actors.lib.scratch import process_directory
from areal_actors.sandbox import BoxRequest, SandboxConfig, create_sandbox
from areal_actors.workflows import CommandAgent, CommandConfig, PoolConfig

MARKER = f"31536{time.monotonic_ns() % 10**6:06}"
"""A number of seconds that no other process of this machine sleeps."""

EPISODES = {
    "answers": "echo done > result",
    "crashes": "kill -9 $$",
    "hangs": f"sleep {MARKER}",
    "leaves daemons": f"echo done > result; setsid sleep {MARKER} & setsid sh -c 'sleep {MARKER} & sleep {MARKER}' &",
    "floods stdout": "echo done > result; yes | head -c 20000000",
    "fills the disk": "head -c 100000000 /dev/zero > file",
    "takes memory": "set -e; python3 -c 'x = [bytearray(1 << 20) for _ in range(1000)]'",
    "forks": "bomb() { bomb | bomb & }; bomb; sleep 100",
}


async def measure(config: SandboxConfig, number: int) -> dict[str, float]:
    """Median milliseconds to open a box, to run a command in it, and to close it, and the processor time of all three.

    The processor time is that of this process and of those in the box; processes of a container's daemon are not in it.
    """
    times: list[tuple[float, ...]] = []
    sandbox = create_sandbox(config.backend)
    before = os.times()
    for _ in range(number):
        marks = [time.perf_counter()]
        async with sandbox.open(BoxRequest(config=config)) as box:
            marks.append(time.perf_counter())
            await box.run(["true"])
            marks.append(time.perf_counter())
        marks.append(time.perf_counter())
        times.append(tuple((after - before) * 1000 for before, after in pairwise(marks)))
    names = ("open_ms", "command_ms", "close_ms")
    medians = {
        name: round(statistics.median(column), 1) for name, column in zip(names, zip(*times, strict=True), strict=True)
    }
    return medians | {"cpu_ms": round((sum(os.times()[:4]) - sum(before[:4])) * 1000 / number, 1)}


async def run_episodes(config: SandboxConfig, number: int) -> Counter[str]:
    """Run episodes of all kinds, and count their ends."""
    ends: Counter[str] = Counter()
    kinds = list(EPISODES)
    script = "case $(cat) in " + " ".join(f"'\"{kind}\"') {code} ;;" for kind, code in EPISODES.items()) + " esac"
    command = CommandConfig(command=("sh", "-c", script.replace("& ;;", "& true ;;")), grader=("test", "-s", "result"))

    async def run(agent: CommandAgent, kind: str) -> None:
        try:
            reward = await agent.run(kind, base_url="http://127.0.0.1:1/v1", api_key="key")
            ends[f"{kind}: reward {reward:g}"] += 1
        except EpisodeError as error:
            reason = next(
                (words for words in ("took longer", "more than", "signal", "status") if words in str(error)), "?"
            )
            ends[f"{kind}: {reason}"] += 1

    async with (
        CommandAgent.open(command, PoolConfig(num_workers=8), sandbox=config) as agent,
        anyio.create_task_group() as tasks,
    ):
        for episode in range(number):
            tasks.start_soon(run, agent, kinds[episode % len(kinds)])
    return ends


def left_behind() -> dict[str, int]:
    """Processes, mounts and directories of this process' boxes that exist now."""
    # Other runs of this machine have boxes, too.
    own = process_directory()
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    children = psutil.Process().children(recursive=True)
    return {
        "processes": sum(MARKER in line or str(own) in line for line in lines) + len(children),
        "mounts": sum("/workspace" in line for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "directories": sum(entry.is_dir() and "etc" not in entry.name for entry in own.iterdir()),
        "open_files": psutil.Process().num_fds(),
    }


async def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--backend", default="bubblewrap")
    parser.add_argument("--image")
    options = parser.parse_args()
    config = SandboxConfig(
        backend=options.backend, image=options.image, memory_mib=128, disk_mib=16, max_processes=32, timeout_seconds=2
    )
    create_sandbox(config.backend).check(config)
    starts = await measure(config, options.starts)
    before = left_behind()
    began = time.perf_counter()
    ends = await run_episodes(config, options.episodes)
    seconds = time.perf_counter() - began
    after = left_behind()
    found = {
        "starts": starts,
        "episodes": options.episodes,
        "episodes_per_second": round(options.episodes / seconds, 1),
        "ends": dict(sorted(ends.items())),
        "left": {name: after[name] - before[name] for name in after},
    }
    print(json.dumps(found, indent=2))
    sys.exit(any(found["left"].values()))


if __name__ == "__main__":
    anyio.run(main)
