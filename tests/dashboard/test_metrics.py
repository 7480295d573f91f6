"""Numbers of a run: complete, strict JSON, one record a step, also after a crash; and what they are summed up to."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.dashboard import STEP_KEYS, MetricsWriter, RunDirectory, read_gauges, summarize_run
from areal_actors.dashboard.records import format_record, read_records
from areal_actors.dashboard.verdict import CAUSES
from areal_actors.messages import EvaluationFinished


def evaluation(version: int, reward: float) -> EvaluationFinished:
    """An evaluation of four episodes."""
    return EvaluationFinished(version=version, reward=reward, num_episodes=4, num_failed=0, seconds=1.0)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(path=tmp_path / "experiment" / "trial")


def write(directory, heard, *, resumed_step=None, clock=lambda: 0.0):
    """Write ``heard`` as one process would."""
    writer = MetricsWriter(directory.metrics, resumed_step=resumed_step, clock=clock)
    writer.open()
    for item in heard:
        writer.on_event(item)
    writer.close()


def test_metrics_record_has_every_key(directory, news):
    """Steps and the evaluation before them; what a step does not have is null, what it has beside is kept."""
    write(directory, [evaluation(0, 0.1), news.step(1, loss=0.5, extra=7), evaluation(1, 0.2)])

    first, second = read_records(directory.metrics)
    assert first == dict.fromkeys(STEP_KEYS) | {"step": 0, "version": 0, "eval_reward": 0.1, "elapsed_seconds": 0.0}
    assert set(second) == {*STEP_KEYS, "extra"}
    assert (second["step"], second["loss"], second["reward"]) == (1, 0.5, 0.5)


def test_metrics_write_nan_as_null(directory, news):
    """A loss that is not a number does not make the file unreadable."""
    write(directory, [news.step(1, loss=math.nan, kl=math.inf)])

    text = directory.metrics.read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None


def test_metrics_line_is_written_at_once(directory, news):
    """A process that is killed right after a step has recorded it."""
    writer = MetricsWriter(directory.metrics)
    writer.open()
    writer.on_event(news.step(1))

    assert len(list(read_records(directory.metrics))) == 1
    writer.close()


def test_resumed_metrics_have_each_step_once(directory, news):
    """What was written after the checkpoint is cut off, half a line included; the time goes on."""
    write(directory, [evaluation(0, 0.1), *map(news.step, (1, 2, 3))], clock=iter([0.0, 1.0, 2.0, 3.0, 4.0]).__next__)
    with directory.metrics.open("a") as file:
        file.write('{"step": 4, "rew')

    write(directory, map(news.step, (3, 4)), resumed_step=2, clock=iter([100.0, 101.0, 102.0]).__next__)

    records = list(read_records(directory.metrics))
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert [record["elapsed_seconds"] for record in records] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert directory.metrics.read_text().count("\n") == 5


def test_new_run_starts_a_new_metrics_file(directory, news):
    """Steps of an earlier run are not mixed in."""
    write(directory, map(news.step, (1, 2, 3)))
    write(directory, [news.step(1)])

    assert [record["step"] for record in read_records(directory.metrics)] == [1]


def test_summary_is_read_from_the_file(directory, news):
    """First and last reward and evaluation, steps and version; a given time goes before the recorded one."""
    heard = [evaluation(0, 0.1), news.step(1, reward=0.2), news.step(2, reward=0.6, eval_reward=0.7)]
    write(directory, heard, clock=iter([0.0, 1.0, 2.0, 3.5]).__next__)

    assert summarize_run(directory).to_json() == {
        "steps": 2,
        "reward_first": 0.2,
        "reward_last": 0.6,
        "eval_first": 0.1,
        "eval_last": 0.7,
        "seconds": 3.5,
        "run_dir": str(directory.path),
        "version": 2,
        "model": None,
        "verdict": None,
    }
    assert summarize_run(directory, seconds=9.0).seconds == 9.0


def test_summary_of_a_run_without_steps(directory):
    """All that is known is that nothing happened."""
    write(directory, [])

    assert summarize_run(directory).steps == 0
    assert summarize_run(directory).reward_last is None


def test_documentation_explains_every_metric():
    """``docs/reference/metrics.md`` has each key of a record once, in the first column of its tables of a step."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    columns = re.findall(r"^\| (`[^|]+) \|", page.partition("## Of a step")[2].partition("\n## ")[0], re.MULTILINE)
    keys = [key for column in columns for key in re.findall(r"`(\w+)`", column)]

    assert sorted(keys) == sorted(STEP_KEYS)


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.floats() | st.text() | st.lists(st.floats())))
def test_record_is_one_line_of_strict_json(record):
    """Whatever it holds."""
    text = format_record(record)

    assert text.count("\n") == 1
    assert set(json.loads(text, parse_constant=pytest.fail)) == set(record)


def latest(directory):
    """The gauges without those of the verdict."""
    return {name: value for name, value in read_gauges(directory).items() if name != "not_learning"}


def test_gauges_have_sources_as_labels(tmp_path):
    """Names that differ in punctuation only are two sources; a source that the latest step lacks has no number."""
    directory = RunDirectory(path=tmp_path)
    lines = [
        {"step": 1, "source/old/reward": 0.0},
        {
            "step": 2,
            "source/a-b/reward": 0.25,
            "source/a.b/reward": 0.75,
            "source/a.b/groups": 3,
            "source/a-b/groups": None,
        },
    ]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert {
        "step_step": 2,
        "step_source_reward": {"a-b": 0.25, "a.b": 0.75},
        "step_source_groups": {"a.b": 3},
    } == latest(directory)


def test_gauges_are_those_of_the_latest_step(tmp_path):
    """The latest evaluation may be older; a growing last line, texts and odd keys do no harm."""
    directory = RunDirectory(path=tmp_path)
    assert {} == latest(directory)
    lines = [
        {"step": 1, "reward": 0.25, "eval_reward": 0.5, "phase": "rl"},
        {"step": 2, "reward": 0.75, "eval_reward": None, "phase": "rl", "agent/ok rate": 1.0},
    ]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew')
    directory.journal.write_bytes(b"x" * 100)

    assert {
        "step_step": 2,
        "step_reward": 0.75,
        "step_eval_reward": 0.5,
        "step_agent_ok_rate": 1.0,
        "journal_bytes": 100,
    } == latest(directory)


def test_gauges_have_the_causes_of_the_verdict(tmp_path):
    """Each cause is 0 or 1, and changes with the steps; before the first step all are 0."""
    directory = RunDirectory(path=tmp_path)
    step = {"step": 1, "reward": 0.0, "groups": 4, "zero_variance_groups": 4, "episodes": 16, "failed_episodes": 0}
    assert read_gauges(directory)["not_learning"] == dict.fromkeys(CAUSES, 0.0)

    directory.metrics.write_text("".join(json.dumps(step | {"step": number}) + "\n" for number in (1, 2, 3)))
    stuck = read_gauges(directory)["not_learning"]
    with directory.metrics.open("a") as file:
        for number in range(4, 9):
            rising = step | {"step": number, "reward": number / 4, "zero_variance_groups": 0}
            file.write(json.dumps(rising) + "\n")
    learning = read_gauges(directory)["not_learning"]

    assert isinstance(stuck, dict)
    assert isinstance(learning, dict)
    assert {cause for cause, is_named in stuck.items() if is_named} == {"equal_rewards"}
    assert set(learning) == set(CAUSES)
    assert not any(learning.values())
