"""Training the agent of a framework for a step, by the command line, and judging what came of it.

The framework lives in an environment of its own; this module does not, and starts the Python of that environment. The
run sees no network but this machine's: ``guard/`` refuses the rest in every Python process of it, and writes down what
was refused.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from shutil import which
from sysconfig import get_path

from attrs import frozen

__all__ = ["GUARD", "ROOT", "Framework", "complaints", "load_frameworks", "run_elsewhere", "train_one_step"]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
GUARD = HERE / "guard"

_OVERRIDES = (
    "total_steps=1",
    "batch_size=2",
    "rollout.group_size=4",
    "eval_dataset=null",
    "logging.display=none",
    "logging.trackers=[]",
)
_TIME_LIMIT_SECONDS = 300.0


@frozen(kw_only=True)
class Framework:
    """What ``frameworks.toml`` says of one: its configuration, what it needs, and what installs that.

    ``module`` is what its agent imports, ``program`` what it starts, ``client`` the environment that has it.
    """

    config: Path
    install: str
    module: str | None = None
    program: str | None = None
    client: str | None = None

    @property
    def is_installed(self) -> bool:
        """Whether this environment has what the agent needs."""
        # Only what is installed: the tests' own modules can be on sys.path, and one of them is called agents.
        installed = [get_path("purelib"), get_path("platlib")]
        has_module = self.module is None or PathFinder.find_spec(self.module, installed) is not None
        return has_module and (self.program is None or which(self.program) is not None)


def load_frameworks() -> Mapping[str, Framework]:
    """All of them, by name."""
    described = tomllib.loads((HERE / "frameworks.toml").read_text(encoding="utf-8"))
    return {name: Framework(**entry | {"config": ROOT / entry["config"]}) for name, entry in described.items()}


def train_one_step(config: Path, run_dir: Path, *, python: str = sys.executable) -> Sequence[str]:
    """Train for one step into ``run_dir``, in the environment of ``python``. Returns what is wrong, at best nothing."""
    network_log = run_dir.with_name(f"{run_dir.name}-network.log")
    command = ["-m", "areal_actors", "train", str(config), *_OVERRIDES, "--run-dir", str(run_dir)]
    ran = _run_guarded([python, *command], network_log)
    if ran.returncode:
        return [f"it ended with {ran.returncode}: {ran.stderr[-2000:]}"]
    return complaints(run_dir, network_log)


def run_elsewhere(config: Path, directory: Path, *, python: str = sys.executable) -> Sequence[str]:
    """Run the agent once, without a run around it (``elsewhere.py``). Returns what is wrong, at best nothing."""
    network_log = directory / "elsewhere-network.log"
    ran = _run_guarded([python, str(HERE / "elsewhere.py"), str(config)], network_log)
    if ran.returncode:
        return [f"elsewhere, it ended with {ran.returncode}: {ran.stderr[-2000:]}"]
    return [f"elsewhere, it asked for the network: {line}" for line in _lines(network_log)]


def _run_guarded(command: Sequence[str], network_log: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(GUARD), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT_SECONDS,
        env=os.environ | {"PYTHONPATH": path, "NETWORK_LOG": str(network_log)},
    )


def complaints(run_dir: Path, network_log: Path) -> Sequence[str]:
    """What is wrong with a run: no step, no loss, nothing trained, episodes that failed, requests to other machines."""
    found = [f"it asked for the network: {line}" for line in _lines(network_log)]
    found += [f"an episode failed: {line}" for line in _lines(run_dir / "failures.jsonl")]
    steps = [json.loads(line) for line in _lines(run_dir / "metrics.jsonl")]
    if not steps:
        return [*found, "it made no step"]
    for step in steps:
        found += [f"step {step['step']}: {what}" for what in _wrong_with(step)]
    return found


def _wrong_with(step: Mapping[str, float]) -> Sequence[str]:
    wrong = [f"the {name} is {step[name]}" for name in ("loss", "reward") if not _is_finite(step[name])]
    wrong += ["no token was trained"] if not step["trained_tokens"] else []
    wrong += [f"{step['failed_episodes']} episodes failed"] if step["failed_episodes"] else []
    return wrong


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _lines(path: Path) -> Sequence[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
