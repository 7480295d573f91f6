"""Runs of several settings and seeds: planned from one command line, resumed by it, and compared as groups."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from tests.stacks.commands import start_command
from tests.stacks.run_files import write_lines

from areal_actors.cli import cli
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.run_record import RunRecord, read_record, write_record
from areal_actors.domain import RunStatus
from areal_actors.errors import ConfigError
from areal_actors.run.comparison import compare_runs, format_comparison
from areal_actors.run.sweeping import plan_sweep

CONFIG = Path(__file__).parents[2] / "examples" / "tiny.yaml"
QUICK = (
    "batch_size=2",
    "rollout.group_size=2",
    "eval_dataset=null",
    "logging={trackers: [], display: plain, page: no}",
)
MAX_SECONDS = 120.0


@pytest.mark.parametrize(
    ("overrides", "seeds", "names"),
    [
        (["batch_size=4"], (), ["trial"]),
        (["trainer.optimizer.learning_rate=1e-3,1e-2"], (), ["trial-learning_rate-1e-3", "trial-learning_rate-1e-2"]),
        (["batch_size=2, 4"], (7, 8), [f"trial-batch_size-{b}-seed-{s}" for b in (2, 4) for s in (7, 8)]),
        (["phases=[rl]"], (1,), ["trial-seed-1"]),
        (["rollout.openai={turn_discount: 0.9, export_style: tree}"], (), ["trial"]),
        (["trial_name=mine", "seed=1,2"], (), ["mine-seed-1", "mine-seed-2"]),
        (['trainer.optimizer.decay="cosine",linear'], (), ["trial-decay-cosine", "trial-decay-linear"]),
    ],
)
def test_sweep_is_every_combination(tmp_path: Path, overrides: list[str], seeds: tuple[int, ...], names: list[str]):
    """Commas in brackets and quotes belong to a value, and each run has a directory of its own name."""
    runs = plan_sweep(CONFIG, [f"fileroot={tmp_path}", *overrides], seeds)

    assert names == [run.name for run in runs]
    assert [tmp_path / "tiny" / name for name in names] == [run.directory.path for run in runs]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["batch_size=2,many"], "batch_size must be a whole number, not 'many'"),
        (["batch_size=2,2"], "trial-batch_size-2 is in the sweep twice"),
        (["batch_size=[1"], "is not valid YAML"),
    ],
)
def test_sweep_refuses_mistakes_before_the_first_run(overrides: list[str], complaint: str):
    """Those of the last run, too."""
    with pytest.raises(ConfigError, match=complaint.replace("[", r"\[")):
        plan_sweep(CONFIG, overrides)


def sweep(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["sweep", str(CONFIG), *QUICK, *map(str, arguments)])


def test_sweep_goes_on_where_it_was_stopped(tmp_path: Path):
    """A signal stops the run that it meets with a checkpoint; the same command resumes it, and makes the others."""
    root, first = f"fileroot={tmp_path / 'runs'}", RunDirectory(path=tmp_path / "runs" / "tiny" / "trial-seed-1")
    words = ("sweep", str(CONFIG), *QUICK, root, "total_steps=1000", "--seeds", "1,2")
    with start_command(*words, log=tmp_path / "log") as process:
        deadline = time.monotonic() + MAX_SECONDS
        while not first.metrics.exists() or first.metrics.stat().st_size == 0:
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        stopped = process.wait(MAX_SECONDS)
    record = read_record(first)
    resumed = sweep(root, "total_steps=1", "--seeds", "1,2", "--json")
    again = sweep(root, "total_steps=1", "--seeds", "1,2")
    refused = sweep(root, "total_steps=1", "--seeds", "1,2", "gconfig.temperature=0.5")

    assert 130 == stopped
    assert record is not None
    assert RunStatus.INTERRUPTED is record.status
    assert 0 == resumed.exit_code, resumed.output
    (group,) = json.loads(resumed.stdout)["groups"]
    assert ["tiny/trial-seed-1", "tiny/trial-seed-2"] == group["runs"]
    assert group["metrics"]["reward"]["low"] < group["metrics"]["reward"]["value"]
    assert "1/2 trial-seed-1: finished before\n2/2 trial-seed-2: finished before\n" == again.stderr
    assert 2 == refused.exit_code
    assert "was made with other settings (gconfig.temperature); set trial_name to sweep anew" in refused.stderr


def write_run(path: Path, settings: Mapping[str, Any], rewards: list[float], *, is_finished: bool = True) -> None:
    """Write the files of a run that comparisons read."""
    directory = RunDirectory(path=path)
    path.mkdir(parents=True)
    directory.config.write_text(json.dumps({"experiment_name": "e", "trial_name": path.name, **settings}))
    write_lines(directory.metrics, [{"step": n, "reward": value} for n, value in enumerate(rewards, start=1)])
    write_record(directory, RunRecord(status=RunStatus.FINISHED if is_finished else RunStatus.FAILED))


rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.sampled_from([1e-3, 1e-2]), rewards), min_size=1, max_size=6), st.integers(1, 5))
def test_comparison_groups_seeds(tmp_path_factory: pytest.TempPathFactory, runs, num_last):
    """Runs that differ in seed and name are one group, whose mean is that of the means of their last values."""
    root = tmp_path_factory.mktemp("runs")
    for seed, (rate, values) in enumerate(runs):
        write_run(root / f"run-{seed}", {"seed": seed, "trainer": {"optimizer": {"learning_rate": rate}}}, values)
    found = {tuple(group.settings.values()): group for group in compare_runs([root], num_last=num_last).groups}

    rates = {rate for rate, _ in runs}
    assert ({(rate,) for rate in rates} if len(rates) > 1 else {()}) == set(found)
    for rate in rates:
        own = [values for its, values in runs if its == rate]
        group = found[(rate,) if len(rates) > 1 else ()]
        assert (min(map(len, own)), max(map(len, own))) == group.steps
        assert group.metrics["reward"].value == pytest.approx(fmean(fmean(v[-num_last:]) for v in own), abs=1e-9)
        assert (len(own) > 1) == (group.metrics["reward"].low is not None)


def test_comparison_is_a_table_with_notes(tmp_path: Path):
    """One row a group, of the rewards or the named metrics; runs that have not finished are named.

    Long values keep their ends, in which files of one directory differ.
    """
    for name in ("soft", "hard"):
        write_run(tmp_path / "long" / name, {"metrics": ["/a" * 40 + f"/mine.py:{name}"]}, [1.0])
    long = format_comparison(compare_runs([tmp_path / "long"]))
    for name, rate, reward in (("a", 1e-3, 0.5), ("b", 1e-3, 0.7), ("c", 1e-2, 0.2)):
        write_run(tmp_path / "rates" / name, {"seed": ord(name), "rate": rate}, [reward], is_finished=name != "c")
    shown = format_comparison(compare_runs([tmp_path / "rates"]))
    for number in range(2):
        write_run(tmp_path / "rates" / f"other-{number}", {str(key): number for key in range(9)}, [number])
    wide = format_comparison(compare_runs([tmp_path / "rates"]))
    named = CliRunner().invoke(cli, ["compare", str(tmp_path), "--metric", "stepp"])

    for line, name in zip(sorted(long.splitlines()[1:3]), ("hard", "soft"), strict=True):
        shortened = line.split()[0]
        assert (40, f"/mine.py:{name}']") == (len(shortened), shortened[-15:])
    head, first, second, _, note = shown.splitlines()
    assert ["rate", "runs", "steps", "reward"] == head.split()
    assert ["0.001", "2", "1", "0.6", "±", "1.3"] == first.split()
    assert ["0.01", "1", "1", "0.2"] == second.split()
    assert note.endswith("c is not finished: failed")
    assert "The groups differ in 10 settings; --json has them all." in wide
    assert "rates/other-0" in wide
    assert "No run has the metric stepp; did you mean step?" in named.stderr
