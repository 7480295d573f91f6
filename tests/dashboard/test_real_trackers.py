"""Runs tracked by wandb offline, MLflow in a file and trackio's local store. ``nox -s trackers`` installs them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from areal_actors.dashboard import RunDirectory, TrackedRun, create_trackers
from areal_actors.dashboard.records import read_records
from areal_actors.domain import RunStatus
from areal_actors.lib.telemetry import logging_to_stream
from areal_actors.messages import EvaluationFinished, RunEnded

pytestmark = pytest.mark.filterwarnings("default")  # of clients that are not ours
ROOT = Path(__file__).parents[2]


def need(package: str) -> None:
    """Skip without the package."""
    pytest.importorskip(package, reason=f"pip install 'areal_actors[{package}]'")


@pytest.fixture
def track(tmp_path, news):
    """Tracks steps of a run in its directory, and returns how many records were lost."""
    directory = RunDirectory(path=tmp_path / "sums" / "first")
    directory.path.mkdir(parents=True)
    directory.config.write_text("seed: 7\ntrainer: {optimizer: {learning_rate: 0.5}}\nproxy: {admin_key: hidden}\n")

    def play(name, steps, *, resumed_step=None, status=RunStatus.FINISHED, **options):
        run = TrackedRun(directory=directory, experiment="sums", trial="first", resumed_step=resumed_step)
        (writer,) = create_trackers({name: options}, run)
        writer.open()
        for step in steps:
            evaluation = EvaluationFinished(version=step, reward=0.25, num_episodes=4, num_failed=0, seconds=1.0)
            writer.on_event(evaluation)
            writer.on_event(news.step(step, reward=step / 10, **{"rollout/format ok=1": 1.0}))
        writer.on_event(RunEnded(status=status))
        writer.close()
        return writer.num_lost

    play.directory = directory
    return play


def wandb_records(path: Path) -> dict[int, dict[str, float]]:
    """The history of an offline run: protobuf messages in the log format of LevelDB, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, place, message, found = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # the rest of a block is too short for the header of a chunk
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        chunk, place = content[place + 7 : place + 7 + length], place + 7 + length
        message = chunk if kind in {1, 2} else message + chunk  # whole or first, against middle or last
        if kind in {1, 4}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                found[record.history.step.num] = values
    return found


PROCESS = """
import sys
from pathlib import Path
from areal_actors.dashboard import RunDirectory, TrackedRun, create_trackers
from areal_actors.messages import EvaluationFinished, StepFinished

run = TrackedRun(directory=RunDirectory(path=Path(sys.argv[2])), experiment="sums", trial="first")
(writer,) = create_trackers({sys.argv[1]: {}}, run)
writer.open()
for step in map(int, sys.argv[3:]):
    writer.on_event(EvaluationFinished(version=step, reward=0.25, num_episodes=4, num_failed=0, seconds=1.0))
    writer.on_event(StepFinished(step=step, metrics={"reward": step / 10}))
writer.close()
assert writer.num_lost == 0
"""


def track_in_process(name: str, directory: Path, *steps: int, **environment: str) -> None:
    """Track steps in a process, after which all files are complete. Its standard output stays that of the command."""
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), **environment}
    command = [sys.executable, "-c", PROCESS, name, str(directory), *map(str, steps)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_wandb_offline_keeps_one_run(track):
    """Two processes write files of one run id, which ``wandb sync`` joins; the key of the service is not in them."""
    need("wandb")
    root = track.directory.path
    for steps in ((1, 2), (3,)):
        track_in_process("wandb", root, *steps, WANDB_MODE="offline")
    files = sorted(
        root.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: len(wandb_records(path)), reverse=True
    )
    identity = json.loads(track.directory.trackers.read_text())["wandb"]["id"]
    histories = [wandb_records(path) for path in files]

    assert [list(history) for history in histories] == [[1, 2], [3]]
    assert {path.name for path in files} == {f"run-{identity}.wandb"}
    assert histories[0][2]["reward"] == 0.2
    assert histories[0][2]["eval_reward"] == 0.25
    content = files[0].read_bytes()
    assert b"learning_rate" in content
    assert b"hidden" not in content


def test_wandb_without_a_key_does_not_ask_for_one(track, monkeypatch, tmp_path, capsys):
    """The records are lost with a warning that says how to log in."""
    need("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)

    with logging_to_stream():
        assert track("wandb", (1,)) == 2
    assert "wandb has no API key" in capsys.readouterr().err


def test_mlflow_keeps_one_run(track):
    """In ``mlflow.db`` of the run; names that MLflow does not allow are changed, settings are parameters."""
    need("mlflow")
    assert track("mlflow", (1, 2), tags={"kind": "test"}) == 0
    assert track("mlflow", (3,), resumed_step=2, tags={"kind": "test"}) == 0

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{track.directory.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    rewards = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "reward")}
    assert rewards == {1: 0.1, 2: 0.2, 3: 0.3}
    assert run.data.metrics["eval_reward"] == 0.25
    assert run.data.metrics["rollout/format ok_1"] == 1.0
    assert run.data.params["trainer.optimizer.learning_rate"] == "0.5"
    assert run.data.params["proxy.admin_key"] == "***"
    assert (run.info.run_name, run.info.status, run.data.tags["kind"]) == ("first", "FINISHED", "test")


def test_mlflow_without_its_server_loses_records_only(track, monkeypatch):
    """Nothing listens there."""
    need("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    assert track("mlflow", (1,), tracking_uri="http://127.0.0.1:9") == 2


def test_trackio_keeps_one_run(tmp_path):
    """In its local store."""
    need("trackio")
    for steps in ((1, 2), (3,)):
        track_in_process("trackio", tmp_path, *steps, TRACKIO_DIR=str(tmp_path / "store"))
    (store,) = (tmp_path / "store").glob("*.db")
    with sqlite3.connect(store) as database:
        found = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    logged = [(name, step, json.loads(text).get("reward")) for name, step, text in found]
    rewards = [record for record in logged if record[2] is not None]

    assert rewards == [("first", 1, 0.1), ("first", 2, 0.2), ("first", 3, 0.3)]


def test_interrupted_run_finishes_its_trackers(tmp_path):
    """Ctrl-C reaches the whole process group, clients included; the resumed run continues in all of them."""
    for package in ("wandb", "mlflow", "trackio"):
        need(package)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "store"),
        "OMP_NUM_THREADS": "1",
    }
    settings = (
        f"fileroot={tmp_path}",
        "experiment_name=sums",
        "trial_name=first",
        "total_steps=1000",
        "batch_size=2",
        "rollout.group_size=2",
        "eval_dataset=null",
        "logging.display=plain",
        "logging.trackers=[wandb, mlflow, trackio]",
    )
    command = [sys.executable, "-m", "areal_actors", "train", str(ROOT / "examples" / "tiny.yaml"), *settings]
    first = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    log = []
    for line in first.stderr:
        log.append(line)
        if line.startswith("step 2/"):
            os.killpg(first.pid, signal.SIGINT)
            break
    log += first.communicate(timeout=120)[1].splitlines(keepends=True)
    assert first.returncode == 0, "".join(log)
    last = list(read_records(tmp_path / "sums" / "first" / "metrics.jsonl"))[-1]["step"]
    more = [*command, f"total_steps={last + 1}", "--resume"]
    second = subprocess.run(more, env=environment, capture_output=True, text=True, check=False, timeout=300)

    assert second.returncode == 0, second.stderr
    assert "tracker_" not in "".join(log) + second.stderr
    directory = RunDirectory(path=tmp_path / "sums" / "first")
    steps = [list(wandb_records(path)) for path in sorted(directory.path.glob("wandb/offline-run-*/run-*.wandb"))]
    assert sorted(steps) == [list(range(1, last + 1)), [last + 1]]
    with sqlite3.connect(directory.path / "mlflow.db") as database:
        (runs,) = database.execute("select count(*) from runs").fetchone()
        logged = database.execute("select step from metrics where key = 'reward' order by step").fetchall()
    assert runs == 1
    assert [step for (step,) in logged] == list(range(1, last + 2))
    (store,) = (tmp_path / "store").glob("*.db")
    with sqlite3.connect(store) as database:
        found = database.execute("select distinct run_name, step from metrics order by step").fetchall()
    assert found == [("first", step) for step in range(1, last + 2)]
