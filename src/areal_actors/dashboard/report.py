"""``report.html``: a run on one page that needs no network, no script and no server.

It is generated only from the files of the run directory, so it can be generated again at any time, also for a run that
crashed. All text of models and agents is escaped; the page has a policy that forbids scripts. The number of
conversations is limited by their size in the page. The template is ``report.html.jinja``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_actors import __version__
from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.metrics import STEP_KEYS, summarize_run
from areal_actors.dashboard.records import read_records
from areal_actors.dashboard.run_record import read_record
from areal_actors.errors import RunDirectoryError
from areal_actors.lib.telemetry import redact_settings

_MAX_SESSION_BYTES = 2_000_000
"""Limit on the size of all conversations in the page together; about a hundred long ones."""
_MAX_STEPS = 1000
_MAX_FAILURES = 50
_MAX_CONFIG = 40_000

_SHADES = 8
_LEAST_LOGPROB = -4.0
"""Tokens at or below this log-probability (2 %) have the darkest shade."""


def write_report(directory: RunDirectory) -> Path:
    """Write ``report.html`` of a run or of an evaluation, and return its path.

    Raises ``RunDirectoryError`` if there is neither, or its files cannot be read or written.
    """
    is_evaluation = directory.evaluation.exists()
    if not is_evaluation and not directory.metrics.exists():
        raise RunDirectoryError(
            f"{directory.path} holds no run: there is no {directory.metrics.name}. Give the directory of a run, as in "
            "runs/<experiment>/<trial>."
        )
    try:
        if is_evaluation:
            document = json.loads(directory.evaluation.read_text(encoding="utf-8"))
            page = _render("evaluation.html.jinja", directory, evaluation=document)
        else:
            records = list(read_records(directory.metrics))
            # The columns of all runs, then those that agents and custom metrics logged.
            further = {
                key: None for one in records for key in one if key not in STEP_KEYS and not key.endswith("/count")
            }
            page = _render(
                "report.html.jinja",
                directory,
                summary=summarize_run(directory).to_json(),
                record=read_record(directory),
                curve=draw_curve(records),
                keys=(*STEP_KEYS, *further),
                # Evenly spread, counted from the end, so that the last step is shown.
                steps=records[::-1][:: max(1, math.ceil(len(records) / _MAX_STEPS))][::-1],
            )
        # It has the conversations of users.
        directory.report.touch(mode=0o600)
        directory.report.chmod(0o600)
        directory.report.write_bytes(_encode(page))
    except OSError as error:
        raise RunDirectoryError(f"The report of {directory.path} could not be written: {error}") from error
    return directory.report


def _render(template: str, directory: RunDirectory, **values: Any) -> str:
    """Render a page with the failures, conversations and settings of ``directory``."""
    from jinja2 import Environment, PackageLoader

    # Everything is escaped, because texts of models and agents may contain markup.
    environment = Environment(
        loader=PackageLoader("areal_actors.dashboard", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": format_number, "shade": shade, "masked": mask_at}
    config = ""
    if directory.config.exists():
        config = redact_settings(directory.config.read_text(encoding="utf-8", errors="replace"))[:_MAX_CONFIG]
    # The count of each reason, and the first episode that had it.
    counts: Counter[str] = Counter()
    first: dict[str, dict[str, Any]] = {}
    for record in read_records(directory.failures):
        reason = str(record.get("failure"))
        counts[reason] += 1
        first.setdefault(reason, record)
    sessions, num_left_out = _sessions(directory, environment)
    return environment.get_template(template).render(
        title=f"{directory.path.parent.name} / {directory.path.name}",
        library_version=__version__,
        config=config,
        failures=[(reason, num, first[reason]) for reason, num in counts.most_common(_MAX_FAILURES)],
        sessions=sessions,
        num_left_out=num_left_out,
        num_shades=_SHADES,
        **values,
    )


# ------------------------------------------------------------------------------------------------ what is shown


def _sessions(directory: RunDirectory, environment: Any) -> tuple[list[str], int]:
    """Return conversations as HTML up to the size limit, newest versions first, and the number that did not fit."""
    template = environment.get_template("session.html.jinja")
    shown: list[str] = []
    room, num_left_out = _MAX_SESSION_BYTES, 0
    # Newest versions first: what has no room is the oldest.
    records = sorted(read_records(directory.sessions), key=lambda record: -int(record.get("version", 0)))
    for record in records:
        untrained = {entry["interaction"]: entry for entry in record.get("untrained", ())}
        html = template.render(session=record, turns=_as_tree(record.get("turns", ())), untrained=untrained)
        size = len(_encode(html))
        if size > room:
            num_left_out += 1
        else:
            room -= size
            shown.append(environment.filters["safe"](html))
    return shown, num_left_out


def _encode(text: str) -> bytes:
    # Texts of agents may contain lone surrogates, which UTF-8 cannot encode.
    return text.encode(errors="replace")


def _as_tree(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns with their depth, each below its conversational parent, siblings in order of request."""
    children: dict[str | None, list[dict[str, Any]]] = {}
    known: set[str] = set()
    for turn in turns:
        parent = turn.get("parent")
        children.setdefault(parent if parent in known else None, []).append(turn)
        known.add(turn["id"])
    ordered: list[dict[str, Any]] = []
    stack = [(turn, 0) for turn in reversed(children.get(None, []))]
    while stack:
        turn, depth = stack.pop()
        ordered.append({**turn, "depth": depth})
        # Only branches are indented; a chain stays at its depth.
        below = children.get(turn["id"], [])
        stack.extend((child, depth + (len(below) > 1)) for child in reversed(below))
    return ordered


# ----------------------------------------------------------------------------------------------------- filters


def format_number(value: Any) -> str:
    """Format a number for a table; null becomes empty text."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def shade(logprob: float | None) -> int:
    """Return a shade from 0 for a certain token up to ``_SHADES - 1`` for a very unlikely one."""
    if logprob is None:
        return 0
    return min(_SHADES - 1, max(0, int(logprob / _LEAST_LOGPROB * _SHADES)))


def mask_at(runs: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """Expand the runs ``[value, count]`` to one value per token; 0 if there are fewer values than tokens."""
    values = [value for value, num in runs for _ in range(num)]
    return [*values[:num_tokens], *([0] * (num_tokens - len(values)))]


def draw_curve(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the points of the learning curve, and the ticks of its axes, in a picture of 720 x 300 points."""
    lines = {
        name: [(record["step"], record[key]) for record in records if record.get(key) is not None and "step" in record]
        for name, key in (("training", "reward"), ("held_out", "eval_reward"))
    }
    steps = [step for line in lines.values() for step, _ in line] or [0]
    values = [value for line in lines.values() for _, value in line] or [0.0]
    low, high = min(0.0, *values), max(values)
    num_steps, height = (max(steps) - min(steps)) or 1, (high - low) or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        return round(50 + 650 * (step - min(steps)) / num_steps, 1), round(270 - 250 * (value - low) / height, 1)

    return {
        **{name: [place(step, value) for step, value in line] for name, line in lines.items()},
        "steps": [(place(step, low)[0], step) for step in sorted({min(steps), max(steps)})],
        "values": [(place(0, low + share * height)[1], low + share * height) for share in (0, 0.25, 0.5, 0.75, 1)],
    }
