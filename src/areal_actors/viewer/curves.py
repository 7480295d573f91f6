"""Curves of runs as a screen can show them: the numbers of ``metrics.jsonl`` as columns, reduced to one point a pixel.

A table remembers how far the file has been read, so that a step costs its own record and not all before it.
"""

from __future__ import annotations

import csv
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_actors.dashboard.records import parse_records

Column = npt.NDArray[np.float64]
_NUMBER = (int, float)
_MAX_POINTS = 2_000
_MAX_EXTENTS = 4
"""Runs for which the extent of each point is sent, too; it doubles the answer, and more areas hide each other."""


class Axis(StrEnum):
    """The horizontal axis of a curve."""

    STEP = "step"
    TIME = "time"
    """Seconds since the run began."""
    TOKENS = "tokens"
    """Tokens sampled since the run began."""


class MetricsTable:
    """The numbers of a growing ``metrics.jsonl``, as a column for each key; what is no number is nan."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._position = 0
        self._columns: dict[str, Column] = {}
        self._num_rows = 0
        # Requests of one browser read the file on several threads.
        self._lock = threading.Lock()

    def read(self) -> Mapping[str, Column]:
        """Return the columns with the records that were added since the last call. Raises ``OSError``."""
        with self._lock:
            if not self._path.exists():
                self._restart(inode=0)
                return {}
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                # A resumed run replaces the file by one without the steps that it repeats.
                if state.st_ino != self._inode or state.st_size < self._position:
                    self._restart(state.st_ino)
                file.seek(self._position)
                added = file.read()
            # A line without its end may still be growing, or be what a killed process left.
            whole = added[: added.rfind(b"\n") + 1]
            self._position += len(whole)
            if records := list(parse_records(whole.splitlines())):
                self._append(records)
            return dict(self._columns)

    def _restart(self, inode: int) -> None:
        self._inode, self._position = inode, 0
        self._columns, self._num_rows = {}, 0

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        keys = dict.fromkeys([*self._columns, *(key for record in records for key in record)])
        for key in keys:
            known = self._columns.get(key)
            if known is None:
                known = np.full(self._num_rows, np.nan)
            values = (record.get(key) for record in records)
            added = [value if isinstance(value, _NUMBER) else np.nan for value in values]
            self._columns[key] = np.concatenate([known, added])
        self._num_rows += len(records)


def place_rows(columns: Mapping[str, Column], axis: Axis) -> Column:
    """Return the position of each row on ``axis``; nan for a row without one."""
    if not columns:
        return np.zeros(0)
    none = np.full(len(next(iter(columns.values()))), np.nan)
    match axis:
        case Axis.STEP:
            return columns.get("step", none)
        case Axis.TIME:
            return columns.get("elapsed_seconds", none)
        case Axis.TOKENS:
            return np.cumsum(np.nan_to_num(columns.get("sampled_tokens", none)))


def sample_curves(
    tables: Mapping[str, Mapping[str, Column]],
    *,
    keys: Sequence[str],
    axis: Axis = Axis.STEP,
    low: float | None = None,
    high: float | None = None,
    num_points: int = 400,
) -> dict[str, Any]:
    """Return the curves of several runs on one grid of at most ``num_points`` positions between ``low`` and ``high``.

    Each curve has the ``mean`` of the rows at each position, nan where there are none. If a position stands for several
    rows, it also has their ``low`` and ``high``. Besides ``keys``, those with a slash are included: what agents, custom
    metrics and sources log.
    """
    places = {name: place_rows(columns, axis) for name, columns in tables.items()}
    known = np.concatenate([np.zeros(0), *places.values()])
    known = known[np.isfinite(known)]
    if not len(known):
        return {"x": [], "curves": {}, "range": None}
    whole = float(known.min()), float(known.max())
    first, last = whole[0] if low is None else low, whole[1] if high is None else high
    num = max(2, min(num_points, _MAX_POINTS))
    if axis is Axis.STEP and last - first < num:  # every step has its own position
        first, last = np.floor(first), np.ceil(last)
        num = int(last - first) + 1
    scale = (num - 1) / (last - first) if last > first else 0.0
    used = np.zeros(num, dtype=bool)
    curves: dict[str, dict[str, Any]] = {}
    for name, columns in tables.items():
        inside = (places[name] >= first) & (places[name] <= last)
        where = np.rint((places[name][inside] - first) * scale).astype(np.intp)
        shown = [key for key in columns if key in keys or ("/" in key and not key.endswith("/count"))]
        curves[name] = {key: found for key in shown if (found := _reduce(where, columns[key][inside], num)) is not None}
        used[where] = True
    for run in curves.values():
        for curve in run.values():
            if len(tables) > _MAX_EXTENTS:
                curve.pop("low", None)
                curve.pop("high", None)
            curve.update({part: np.ascontiguousarray(values[used], np.float32) for part, values in curve.items()})
    return {"x": np.linspace(first, last, num)[used], "curves": curves, "range": whole}


def _reduce(where: npt.NDArray[np.intp], values: Column, num: int) -> dict[str, Column] | None:
    """Return the mean of the ``values`` at each of ``num`` positions, with their extent if one has several of them."""
    valid = np.isfinite(values)
    where, values = where[valid], values[valid]
    if not len(values):
        return None
    counts = np.bincount(where, minlength=num)
    with np.errstate(invalid="ignore"):
        found = {"mean": np.bincount(where, values, minlength=num) / counts}
    if counts.max() > 1:
        for part, extreme in (("low", np.fmin), ("high", np.fmax)):
            found[part] = np.full(num, np.nan)
            extreme.at(found[part], where, values)
    return found


def format_csv(tables: Mapping[str, Mapping[str, Column]]) -> str:
    """Return all numbers of several runs as CSV, a row for each record, with the name of its run."""
    keys = list(dict.fromkeys(key for columns in tables.values() for key in columns if np.isfinite(columns[key]).any()))
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(["run", *keys])
    for name, columns in tables.items():
        writer.writerows([name, *row] for row in _rows(columns, keys))
    return text.getvalue()


def _rows(columns: Mapping[str, Column], keys: Sequence[str]) -> Iterator[list[float | int | None]]:
    num = len(next(iter(columns.values()), ()))
    none = np.full(num, np.nan)
    for row in zip(*(columns.get(key, none).tolist() for key in keys), strict=True):
        yield [None if math.isnan(value) else int(value) if value.is_integer() else value for value in row]
