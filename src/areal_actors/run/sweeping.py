"""A sweep: every combination of settings and seeds, one ordinary run after the other, each in its own process.

A run that has finished is not repeated, and one that was interrupted is resumed, so that the same command goes on with
a sweep that has ended early.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import product
from pathlib import Path
from types import FrameType

import yaml
from attrs import frozen

from areal_actors.config import RunConfig, format_config, load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.run_record import read_record
from areal_actors.domain import RunStatus
from areal_actors.errors import ConfigError
from areal_actors.run.directory import parse_settings

_MAX_VALUE = 40
"""Characters of a value in the name of a run; a longer one is shortened, with a digest."""


@frozen(kw_only=True)
class SweepRun:
    """One run of a sweep: its settings as on a command line, and where it is written."""

    name: str
    overrides: tuple[str, ...]
    directory: RunDirectory
    is_finished: bool

    @property
    def status(self) -> RunStatus | None:
        """How the run ended, or that it runs; ``None`` if it has not begun."""
        record = read_record(self.directory)
        return None if record is None else record.status


def plan_sweep(config: Path, overrides: Sequence[str], seeds: Sequence[int] = ()) -> tuple[SweepRun, ...]:
    """Return the runs of a sweep over ``overrides``, of which ``key=a,b`` has two values, and over ``seeds``.

    Raises ``ConfigError`` for mistakes in any of them, and for runs that were made with other settings.
    """
    fixed, swept = [], []
    for override in overrides:
        key, equals, text = override.partition("=")
        values = _split(text) if equals else []
        if len(values) > 1:
            swept.append([(key, value) for value in values])
        else:
            fixed.append(override)
    if seeds:
        swept.append([("seed", str(seed)) for seed in seeds])
    planned: dict[str, SweepRun] = {}
    for point in product(*swept):
        own = (*fixed, *(f"{key}={value}" for key, value in point))
        parts = (f"{key.rpartition('.')[2]}-{_slug(value)}" for key, value in point)
        name = "-".join((load_config(config, own).trial_name, *parts))
        run = _plan_run(config, name, (*own, f"trial_name={name}"))
        if name in planned:
            raise ConfigError(f"{name} is in the sweep twice; give each value once.")
        planned[name] = run
    return tuple(planned.values())


def _split(text: str) -> list[str]:
    """Return the values between the commas of ``text``, as they are written; commas in brackets and quotes are kept."""
    try:
        node = yaml.compose(f"[{text}]")
    except yaml.YAMLError:
        return [text]  # which the configuration refuses
    assert isinstance(node, yaml.SequenceNode)
    return [text[each.start_mark.index - 1 : each.end_mark.index - 1].strip() for each in node.value]


def _slug(value: str) -> str:
    plain = value.strip("\"'")
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", plain)[:_MAX_VALUE]
    return text if text == plain else f"{text}-{blake2b(plain.encode(), digest_size=3).hexdigest()}"


def _plan_run(config: Path, name: str, overrides: tuple[str, ...]) -> SweepRun:
    loaded = load_config(config, overrides)
    directory, record = loaded.run_directory, read_record(loaded.run_directory)
    changed = _find_changes(loaded, directory)
    # More steps may be wanted of a run than it was made with.
    if others := changed - {"total_steps"}:
        raise ConfigError(
            f"{directory.path} was made with other settings ({', '.join(sorted(others))}); set trial_name to sweep anew"
        )
    is_finished = record is not None and record.status is RunStatus.FINISHED and not changed
    return SweepRun(name=name, overrides=overrides, directory=directory, is_finished=is_finished)


def _find_changes(config: RunConfig, directory: RunDirectory) -> frozenset[str]:
    """Return the settings in which ``config`` differs from the run; one that a version has added is no difference."""
    if not directory.config.exists():
        return frozenset()
    before, now = parse_settings(directory.config.read_text(encoding="utf-8")), parse_settings(format_config(config))
    return frozenset(name for name in before.keys() & now.keys() if before[name] != now[name])


def run_sweep(config: Path, runs: Sequence[SweepRun], *, announce: Callable[[str], None]) -> bool:
    """Train each run that has not finished; return whether a signal stopped the sweep. Blocks.

    A run that fails does not keep the others from being made.
    """
    for number, run in enumerate(runs, start=1):
        if run.is_finished:
            announce(f"{number}/{len(runs)} {run.name}: finished before")
            continue
        announce(f"{number}/{len(runs)} {run.name}")
        command = [sys.executable, "-m", "areal_actors", "train", str(config), *run.overrides, "--resume=auto"]
        # Its standard output is a summary for programs; its display is on standard error.
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child, _forwarding(child) as received:  # noqa: S603
            child.wait()
        if received or run.status is RunStatus.INTERRUPTED:
            return True
    return False


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Yield the signals that ask to stop, which the child gets, too, and which do not end this process."""
    received: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        received.append(number)
        # A terminal sends SIGINT to the child as well, which would take a second one as a wish to leave at once.
        if number != signal.SIGINT:
            child.send_signal(number)

    former = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
