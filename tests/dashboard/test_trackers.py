"""Trackers: what they are told, and what happens when one fails. ``test_real_trackers`` uses the real clients."""

from __future__ import annotations

import re
import threading

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.config import create_config
from areal_actors.dashboard import (
    RunDirectory,
    TrackedRun,
    TrackerWriter,
    create_trackers,
    require_trackers,
)
from areal_actors.dashboard.trackers import TRACKERS
from areal_actors.domain import RunStatus
from areal_actors.errors import ConfigError
from areal_actors.messages import EvaluationFinished, PhaseChanged, RunEnded

MINIMAL = {"experiment_name": "sums", "total_steps": 3, "model": "tiny"}


class Notes:
    """A tracker that notes its calls; ``failing`` names the ones that raise."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.calls: list[tuple[str, int, dict[str, float]]] = []
        self.is_closed = False
        self.status: RunStatus | None = None

    def open(self):
        if "open" in self.failing:
            raise ConnectionError("no server")
        return self

    def log(self, values, step):
        self.calls.append(("log", step, values))
        if f"step {step}" in self.failing:
            raise TimeoutError("too slow")

    def finish(self, status: RunStatus) -> None:
        self.is_closed = True
        self.status = status
        if "close" in self.failing:
            raise SystemExit(1)


def play(tracker, heard, **options):
    """A writer that has passed on all news."""
    writer = TrackerWriter("notes", tracker.open, **options)
    writer.open()
    for item in heard:
        writer.on_event(item)
    writer.close()
    return writer


def evaluation(version, reward):
    return EvaluationFinished(version=version, reward=reward, num_episodes=4, num_failed=0, seconds=1.0)


@frozen
class Warnings:
    """The warnings of trackers, from the log of the test."""

    text: str

    def count(self, event: str) -> int:
        return self.text.count(event)


@pytest.fixture
def warnings_of(capsys):
    """What was logged so far."""
    from areal_actors.lib.telemetry import logging_to_stream

    with logging_to_stream():
        yield lambda: Warnings(capsys.readouterr().err)


def test_tracker_gets_numbers_of_steps_and_evaluations(news):
    """By the names and steps of ``metrics.jsonl``; without what is null, and each evaluation once."""
    tracker = Notes()
    heard = [evaluation(0, 0.1), news.step(1, loss=0.5, kl=None, eval_reward=0.2, **{"eval-rollout/x": 1.0})]
    writer = play(tracker, [*heard, PhaseChanged(phase="saving")])

    assert tracker.calls == [
        ("log", 0, {"eval_reward": 0.1, "eval_seconds": 1.0}),
        ("log", 1, {"step": 1.0, "version": 1.0, "reward": 0.5, "loss": 0.5}),
    ]
    assert tracker.is_closed
    assert writer.num_lost == 0


@pytest.mark.parametrize(("failing", "num_lost"), [(("step 1",), 1), (("open",), 3), (("step 2", "close"), 1)])
def test_failing_tracker_is_reported_once_and_counted(news, warnings_of, failing, num_lost):
    """Nothing is raised, later records are still tried, and a tracker that was opened is finished."""
    tracker = Notes(*failing)
    writer = play(tracker, [news.step(step) for step in (1, 2, 3)])
    found = warnings_of()

    assert writer.num_lost == num_lost
    assert tracker.is_closed is ("open" not in failing)
    assert (1, 1) == (found.count("tracker_failed"), found.count("tracker_lost_records"))


@pytest.mark.parametrize("status", [RunStatus.FINISHED, RunStatus.INTERRUPTED, RunStatus.FAILED])
def test_tracker_gets_status_of_the_ended_run(news, status):
    """Trackers show other states for runs that failed, and notify people of them."""
    tracker = Notes()
    play(tracker, [news.step(1), RunEnded(status=status)])

    assert status is tracker.status


def test_tracker_without_run_ended_reports_failure(news):
    """The reporter itself may be what failed."""
    tracker = Notes()
    play(tracker, [news.step(1)])

    assert RunStatus.FAILED is tracker.status


def test_hanging_tracker_does_not_delay_the_run(news, warnings_of):
    """Records beyond the queue are dropped and counted, and the end of the run waits for a limited time."""
    released = threading.Event()

    class Hanging(Notes):
        def open(self) -> None:
            released.wait()

    writer = play(Hanging(), [news.step(step) for step in range(1, 1101)], close_seconds=0.05)
    found = warnings_of()
    released.set()

    assert 1090 <= writer.num_lost <= 1101
    assert (1, 1) == (found.count("tracker_failed"), found.count("tracker_lost_records"))


def test_tensorboard_gets_numbers_and_configuration(tmp_path, news):
    """An event file with a scalar for each number."""
    directory = RunDirectory(path=tmp_path)
    directory.config.write_text("seed: 7\nproxy: {admin_key: hidden-word}\n")
    (writer,) = create_trackers({"tensorboard": {}}, TrackedRun(directory=directory, experiment="e", trial="t"))
    writer.open()
    for item in (evaluation(0, 0.1), news.step(1, loss=0.5, kl=None)):
        writer.on_event(item)
    writer.close()
    writer.close()

    (file,) = directory.tensorboard.iterdir()
    words = set(re.findall(rb"[a-z_]+", file.read_bytes()))
    assert {b"reward", b"loss", b"eval_reward", b"seed"} <= words
    assert not {b"kl", b"hidden"} & words
    assert writer.num_lost == 0


@given(
    st.dictionaries(
        st.sampled_from(["admin_key", "password", "HF_TOKEN", "Authorization", "keys"]),
        st.text(min_size=4) | st.lists(st.text(min_size=4)),
    )
)
def test_tracker_settings_contain_no_secret(tmp_path_factory, secrets):
    """Keys, tokens and passwords of the configuration are starred; settings that only sound similar are not."""
    from areal_actors.config.documents import format_yaml

    directory = RunDirectory(path=tmp_path_factory.mktemp("run"))
    settings = {"tokenizer": "tiny", "max_tokens": 5, "proxy": {"env": [secrets], **secrets}}
    directory.config.write_text(format_yaml(settings))
    found = TrackedRun(directory=directory, experiment="e", trial="t").settings()

    assert (found["tokenizer"], found["max_tokens"]) == ("tiny", 5)
    assert found["proxy.env"] == str([dict.fromkeys(secrets, "***")])
    assert all(found[f"proxy.{name}"] == "***" for name in secrets)


def test_tracker_names_are_kept_for_a_resumed_run(tmp_path):
    """Each tracker reads what it stored; a damaged file is as none."""
    run = TrackedRun(directory=RunDirectory(path=tmp_path), experiment="e", trial="t")
    run.remember("wandb", id="abc")
    run.remember("mlflow", run_id="1", tracking_uri="sqlite:///x")

    assert run.recall("wandb") == {"id": "abc"}
    assert run.recall("mlflow")["run_id"] == "1"
    assert run.recall("trackio") == {}
    run.directory.trackers.write_text("{")
    assert run.recall("wandb") == {}


def test_trackers_setting_takes_names_and_options():
    """The default is ``tensorboard`` alone."""

    def names(**logging):
        return create_config(MINIMAL | {"logging": logging}).logging.tracker_options

    assert names() == {"tensorboard": {}}
    assert names(trackers=["wandb", {"mlflow": {"tracking_uri": "http://x"}}, {"trackio": None}]) == {
        "wandb": {},
        "mlflow": {"tracking_uri": "http://x"},
        "trackio": {},
    }
    assert names(trackers=[]) == {}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (["wandbb"], r"not 'wandbb'; did you mean wandb\?"),
        ([{}], r"has an entry without a name; name one of tensorboard, wandb, mlflow, trackio, or use \[\] for none"),
        (["neptune"], "must name trackers \\(tensorboard, wandb, mlflow"),
        (["wandb", {"wandb": {}}], "names wandb twice"),
        ([{"mlflow": "http://x"}], "options of mlflow as a mapping, not 'http://x'"),
    ],
)
def test_trackers_setting_names_its_mistakes(entries, reason):
    """With its path, and the nearest name."""
    with pytest.raises(ConfigError, match=rf"logging\.trackers .*{reason}"):
        create_config(MINIMAL | {"logging": {"trackers": entries}})


def test_tracker_without_its_package_has_its_install_line(monkeypatch, tmp_path):
    """A directory of the package's name next to the program, such as wandb's own, does not count as the package."""
    monkeypatch.setitem(TRACKERS, "wandb", evolve(TRACKERS["wandb"], package="absent_tracker"))
    (tmp_path / "absent_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    require_trackers(["tensorboard"])
    with pytest.raises(ConfigError, match=r"absent_tracker is not installed: pip install 'areal_actors\[wandb\]'"):
        require_trackers(["tensorboard", "wandb"])
