"""On what, and with what, figures were measured: facts without which a number of a benchmark says little."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "ROOT", "describe_machine", "load_average"]

ROOT = Path(__file__).parents[1]

PACKAGES = ("anyio", "attrs", "hypercorn", "httpx", "numpy", "openai", "starlette", "torch", "transformers", "trio")
"""Whose versions move the figures."""


def describe_machine() -> dict[str, Any]:
    """The processor, the versions and the revision, as a plain dict."""
    return {
        "cpu": _cpu_model(),
        "cores": _num_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _installed(name)) is not None},
        "revision": _revision(),
    }


def load_average() -> list[float]:
    """Processes that ran or waited in the last 1, 5 and 15 minutes; empty where the system does not say."""
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except (AttributeError, OSError):
        return []


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _num_cores() -> int:
    """Those that this process may use, which in a container are fewer than there are."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit, with ``+`` behind it where the working tree differs; ``None`` outside of a repository."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
