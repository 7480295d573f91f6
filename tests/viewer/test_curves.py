"""Curves for a screen: read once while the file grows, and reduced without losing what they show."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stacks.run_files import step, write_lines

from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.records import rewrite_records
from areal_actors.viewer.curves import Axis, MetricsTable, format_csv, place_rows, sample_curves


@given(cuts=st.lists(st.integers(0, 400), max_size=8), num_steps=st.integers(0, 6))
def test_growing_metrics_are_read_once(tmp_path_factory, cuts, num_steps):
    """However the writer's bytes are cut into pieces, a reader between them gets each record once, in order."""
    directory = RunDirectory(path=tmp_path_factory.mktemp("run"))
    table = MetricsTable(directory.metrics)
    # A key that only some records have.
    records = [step(number, **({"odd": 1.5} if number % 2 else {})) for number in range(num_steps)]
    text = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    written = 0
    for end in (*sorted(cut for cut in cuts if cut < len(text)), len(text)):
        with directory.metrics.open("ab") as file:
            file.write(text[written:end])
        written = end
        table.read()

    columns = table.read()
    assert list(range(num_steps)) == list(columns.get("step", ()))
    assert [1.5 if number % 2 else None for number in range(num_steps)] == [
        None if np.isnan(value) else value for value in columns.get("odd", np.full(num_steps, np.nan))
    ]


def test_replaced_metrics_are_read_from_the_beginning(directory):
    """A resumed run removes the records of the steps that it repeats."""
    table = MetricsTable(directory.metrics)
    assert [1, 2, 3] == list(table.read()["step"])

    rewrite_records(directory.metrics, lambda record: record["step"] < 2)
    assert [1] == list(table.read()["step"])
    directory.metrics.unlink()
    assert {} == table.read()


@given(
    values=st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=60),
    num_points=st.integers(2, 50),
    axis=st.sampled_from(Axis),
)
def test_reduced_curves_keep_extremes_and_means(values, num_points, axis):
    """However few points there are: the extremes are those of all rows, and the counted mean is theirs, too."""
    rows = np.array([np.nan if value is None else value for value in values])
    numbers = np.arange(len(values), dtype=float)
    columns = {"step": numbers, "elapsed_seconds": numbers**2, "sampled_tokens": numbers, "reward": rows}

    found = sample_curves({"run": columns}, keys=["reward"], axis=axis, num_points=num_points)

    known = rows[np.isfinite(rows)]
    assert len(found["x"]) <= max(num_points, 2)
    assert (np.diff(found["x"]) > 0).all()
    if not len(known):
        assert {} == found["curves"]["run"]
        return
    curve = found["curves"]["run"]["reward"]
    low, high = curve.get("low", curve["mean"]), curve.get("high", curve["mean"])
    assert np.nanmin(low) == np.float32(known.min())
    assert np.nanmax(high) == np.float32(known.max())
    assert np.nanmin(curve["mean"]) >= np.float32(known.min()) - 1e-5
    assert np.nanmax(curve["mean"]) <= np.float32(known.max()) + 1e-5


def test_curves_of_runs_share_their_positions(tmp_path):
    """Zoomed, too; a custom number is sent without being asked for, and how many episodes logged it is not."""
    tables = {}
    for name, num_steps in (("short", 2), ("long", 5)):
        path = tmp_path / name / "metrics.jsonl"
        write_lines(path, [step(number, **{"rollout/ok": 1.0, "rollout/ok/count": 4}) for number in range(num_steps)])
        tables[name] = MetricsTable(path).read()

    found = sample_curves(tables, keys=["reward"], low=0.5, high=3)

    assert [0, 1, 2, 3] == list(found["x"])[-4:]
    assert (0.0, 4.0) == found["range"]
    assert {"reward", "rollout/ok"} == set(found["curves"]["long"])
    assert np.isnan(found["curves"]["short"]["reward"]["mean"][-1])
    assert "run,step,version,reward,rollout/ok,rollout/ok/count" == format_csv(tables).splitlines()[0]
    assert 8 == len(format_csv(tables).splitlines())


@pytest.mark.parametrize("axis", Axis)
def test_runs_without_steps_have_no_positions(axis):
    """Neither has a run whose records lack the axis."""
    assert 0 == len(place_rows({}, axis))
    assert [] == sample_curves({"a": {}, "b": {"step": np.array([np.nan])}}, keys=["reward"], axis=Axis.STEP)["x"]
