"""``python -m tools.agents.training AGENT``: train an agent that people install, once with each seed.

The configurations are in ``examples/agents``. The rewards of all steps are written to ``training.json``; the page of
the agents shows the first and the last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

__all__ = ["LEARNED", "SEEDS", "TITLES", "find_rise", "load_training"]

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
TRAINING = Path(__file__).with_name("training.json")
TITLES = {"mini_swe_agent": "mini-swe-agent", "openai_agents_digits": "@openai/agents"}
"""The agents that are trained, by the names of their configurations."""
SEEDS = (1, 2, 3)
LEARNED = 0.3
"""How much the reward rises in a run that learns: from the first step of RL to the mean of the last five."""


def load_training(path: Path = TRAINING) -> dict[str, Any]:
    """Return the runs so far: by agent and seed, the rewards of all steps of RL, and the seconds of the run."""
    runs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return runs


def find_rise(rewards: Sequence[float]) -> float:
    """Return how much the reward has risen. Single steps of 16 episodes vary too much to be compared."""
    return mean(rewards[-5:]) - rewards[0]


def train(name: str, *, seed: int, python: str, folder: Path | None) -> dict[str, Any]:
    """Run ``areal-actors train`` in a scratch directory, and return its rewards. Raises ``CalledProcessError``."""
    with tempfile.TemporaryDirectory(prefix="agent-training-") as scratch:
        # Node finds modules next to a script, or above it.
        configured = Path(shutil.copytree(EXAMPLES, Path(scratch, "agents")))
        if folder is not None:
            (configured / "node_modules").symlink_to(folder / "node_modules")
        command = [python, "-m", "areal_actors", "train", str(configured / f"{name}.yaml")]
        command += [f"seed={seed}", f"fileroot={scratch}", "logging.trackers=[]", "checkpoint.every_steps=100000"]
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])  # bwrap may be a wheel's
        started = time.monotonic()
        subprocess.run(command, check=True, env=os.environ | {"PATH": path})
        seconds = time.monotonic() - started
        (metrics,) = Path(scratch).rglob("metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {
        "rewards": [round(row["reward"], 4) for row in rows if row.get("phase") != "sft"],
        "seconds": round(seconds),
    }


def save_run(name: str, seed: int, run: Mapping[str, Any]) -> None:
    """Add a run to the file, with one line for each."""
    runs = load_training()
    runs.setdefault(name, {})[str(seed)] = run
    text = ",\n".join(
        f" {json.dumps(agent)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in of.items())
        + "\n }"
        for agent, of in runs.items()
    )
    TRAINING.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def main() -> int:
    """Train the agent that the command line names, and write its rewards. Return 1 if a run does not learn."""
    from tools.agents.page import PAGE, format_page, load_results

    parser = argparse.ArgumentParser(prog="python -m tools.agents.training", description=__doc__)
    parser.add_argument("agent", choices=TITLES)
    parser.add_argument("--folder", type=Path, help="where npm has installed the agent")
    parser.add_argument("--python", default=sys.executable, help="of the environment that has the agent")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments = parser.parse_args()
    if arguments.folder and shutil.which("node") is None:
        parser.error("agents in JavaScript need node")
    has_failed = False
    for seed in arguments.seeds:
        run = train(
            arguments.agent, seed=seed, python=arguments.python, folder=arguments.folder and arguments.folder.absolute()
        )
        save_run(arguments.agent, seed, run)
        PAGE.write_text(format_page(load_results()), encoding="utf-8")
        first, last = run["rewards"][0], run["rewards"][-1]
        has_failed |= find_rise(run["rewards"]) < LEARNED
        print(f"{arguments.agent}, seed {seed}: {first} to {last} in {run['seconds']} s")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
