"""Record the first contact: every command from ``git clone`` to a trained model, its output and its processor time.

::

    python -m tools.recording [REPOSITORY]

runs the commands in an empty home directory, with a clone of this repository or of ``REPOSITORY``, and writes
``docs/tutorials/recording.md``. It fails if a command fails or if the reward on held-out problems does not rise.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import frozen
from benchmarks.machine import ROOT, describe_machine

__all__ = ["COMMANDS", "PAGE", "Recorded", "format_page", "main", "parse_recording"]

PAGE = ROOT / "docs" / "tutorials" / "recording.md"
COMMANDS = (
    "git clone REPOSITORY areal_actors && cd areal_actors",
    "python3 -m venv .venv",
    '.venv/bin/pip install -c constraints.txt -e ".[recipes]"',
    "source .venv/bin/activate",
    "areal-actors doctor examples/tiny.yaml",
    "areal-actors try examples/tiny.yaml -n 2",
    "areal-actors train examples/tiny.yaml",
    "areal-actors runs",
    "areal-actors eval examples/tiny.yaml --model runs/tiny/trial --k 4",
)
"""What a newcomer types, in one shell."""
_MARK = "=-=recorded"
_MAX_LINES, _MAX_INSTALLATION_LINES = 90, 2
"""Longer outputs are cut in the middle, and those of an installation at their beginning."""
_MAX_COLUMNS = 160


@frozen(kw_only=True)
class Recorded:
    """A command, with what it printed and the seconds that it took of all processors."""

    command: str
    output: tuple[str, ...]
    cpu_seconds: float


def main(words: Sequence[str] = ()) -> None:
    """Run the commands and write the page. ``words`` may name another repository to clone."""
    repository = words[0] if words else str(ROOT)
    with TemporaryDirectory(prefix="areal-recording-") as place:
        recorded = parse_recording(_run(repository, Path(place)))
        if len(recorded) < len(COMMANDS):
            raise SystemExit(f"{COMMANDS[len(recorded)]} failed.")
        text = format_page(recorded, describe_machine(), hidden={repository: "REPOSITORY", place: "~"})
    PAGE.write_text(text, encoding="utf-8")


def parse_recording(lines: Iterable[str]) -> tuple[Recorded, ...]:
    """Return the commands that succeeded, from the lines of the shell that ran ``COMMANDS``."""
    found: list[Recorded] = []
    output: list[str] = []
    for line in lines:
        if not line.startswith(_MARK):
            output.append(line)
            continue
        user, system = map(float, line.split()[1:])
        command = COMMANDS[len(found)]
        found.append(Recorded(command=command, output=tuple(output), cpu_seconds=user + system))
        output = []
    return tuple(found)


def format_page(recorded: Sequence[Recorded], machine: dict[str, Any], *, hidden: dict[str, str]) -> str:
    """Return the page, with the texts of this machine in ``hidden`` replaced. Raises if the reward did not rise."""
    summary = _read_summary(recorded)
    first, last = summary["eval_first"], summary["eval_last"]
    if last <= first:
        raise SystemExit(f"The reward did not rise: {first:.3f} to {last:.3f}.")
    text = [
        "# From the clone to a trained model, recorded",
        "",
        "Every command from `git clone` to a model that has learned, with its output. The model has random weights and",
        "learns to write digits. The commands ran in one shell with an empty home directory: nothing was installed",
        "before.",
        "",
        f"In {summary['steps']} steps, the reward on held-out problems rose from {first:.2f} to {last:.2f}.",
        "",
        f"The machine: {machine['cpu']}, {machine['cores']} cores, no GPU, Python {machine['python']}. It was shared,",
        "so each command has the seconds of all processors that it used, instead of those on the clock.",
        "",
        "| Command | Seconds of processors |",
        "|---|---|",
        *(f"| `{one.command}` | {one.cpu_seconds:.1f} |" for one in recorded),
        f"| all | {sum(one.cpu_seconds for one in recorded):.1f} |",
        "",
        "`python -m tools.recording` in a clone runs the commands again and writes this page. Long outputs are cut.",
    ]
    for one in recorded:
        text += ["", f"## `{one.command}`", ""]
        lines = _shorten(one, hidden)
        text += ["```text", *lines, "```"] if lines else ["It prints nothing."]
    return "\n".join(text) + "\n"


def _run(repository: str, place: Path) -> Iterable[str]:
    """Run the commands in one shell in ``place``, and yield its lines until one fails."""
    script = f"TIMEFORMAT='{_MARK} %U %S'\n"
    script += "".join(f"time {{ {command.replace('REPOSITORY', repository)}; }} || exit 1\n" for command in COMMANDS)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=place,
        env=kept | {"HOME": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert shell.stdout is not None
    for raw in shell.stdout:
        # A terminal shows what follows the last carriage return of a progress bar.
        line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
        print(line, file=sys.stderr)
        yield line
    shell.wait()


def _read_summary(recorded: Sequence[Recorded]) -> dict[str, Any]:
    (training,) = [one for one in recorded if one.command.startswith("areal-actors train")]
    summary: dict[str, Any] = json.loads(next(line for line in training.output if line.startswith("{")))
    return summary


def _shorten(recorded: Recorded, hidden: dict[str, str]) -> list[str]:
    output = re.sub(r"(token=)[\w.-]+", r"\1...", "\n".join(recorded.output))
    for name, replacement in hidden.items():
        output = output.replace(name, replacement)
    lines = [line if len(line) <= _MAX_COLUMNS else f"{line[:_MAX_COLUMNS]} ..." for line in output.splitlines()]
    lines = [line for line in lines if line]
    if "pip install" in recorded.command and len(lines) > _MAX_INSTALLATION_LINES:
        return [f"... {len(lines) - _MAX_INSTALLATION_LINES} lines ...", *lines[-_MAX_INSTALLATION_LINES:]]
    if len(lines) > _MAX_LINES:
        half = _MAX_LINES // 2
        return [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
