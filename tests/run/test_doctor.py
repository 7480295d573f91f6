"""`areal-actors doctor` checks everything that a job needs, and says what to do about each problem."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner, Result

from areal_actors.cli import cli
from areal_actors.config import RunConfig, load_config
from areal_actors.dashboard.trackers import TRACKERS
from areal_actors.run.doctor import Finding, Verdict, examine

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny.yaml"


def look(directory: Path, *overrides: str) -> dict[str, Finding]:
    """Return the findings about the example by check."""
    config: RunConfig = load_config(EXAMPLE, [f"fileroot={directory}", *overrides])
    return {finding.check: finding for finding in examine(config)}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, arguments)])


def test_doctor_finds_no_problem_in_working_job(tmp_path):
    """Every line is ok, the exit code is 0, and nothing was written."""
    result = run(EXAMPLE, f"fileroot={tmp_path}")

    assert result.exit_code == 0, result.output
    assert all(line.startswith("ok") for line in result.output.splitlines())
    assert list(tmp_path.iterdir()) == []


def test_doctor_reports_all_problems_at_once(tmp_path):
    """All checks run although one fails; the exit code is 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run(
            EXAMPLE,
            "--json",
            f"fileroot={tmp_path}",
            "model=nonsense",
            f"proxy.port={port}",
            f"rollout.workflow={EXAMPLE.parent}/tiny_agent.py:Absent",
            "engine.device=cuda:99",
        )
    found = {each["check"]: each for each in map(json.loads, result.output.splitlines())}

    assert result.exit_code == 1
    assert {"model", "agent", "port"} <= {name for name, each in found.items() if each["verdict"] == "failed"}
    assert "nonsense" in found["model"]["detail"]
    assert "Absent" in found["agent"]["detail"]
    assert str(port) in found["port"]["detail"]
    assert found["packages"]["verdict"] == found["journal"]["verdict"] == "ok"


def test_doctor_names_proxy_of_environment(tmp_path, monkeypatch):
    """Agents' requests to the run do not go there, which is not obvious in the network of a company."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    found = look(tmp_path, "model=absent")["HTTP proxy"]

    assert (found.verdict, "HTTP_PROXY" in found.detail, "127.0.0.1 do not" in found.detail) == (Verdict.OK, True, True)


def test_doctor_names_install_line_of_missing_tracker(tmp_path, monkeypatch):
    """A run is refused before its directory is created."""
    absent = evolve(TRACKERS["wandb"], package="absent_tracker")
    monkeypatch.setitem(TRACKERS, "wandb", absent)
    tracked = "logging.trackers=[wandb]"
    found = look(tmp_path, tracked)["packages"]
    begun = CliRunner().invoke(cli, ["train", str(EXAMPLE), f"fileroot={tmp_path / 'runs'}", tracked])

    assert found.verdict is Verdict.FAILED
    assert "absent_tracker is not installed: pip install 'areal_actors[wandb]'" in found.detail
    assert begun.exit_code == 2
    assert "pip install 'areal_actors[wandb]'" in begun.output
    assert not (tmp_path / "runs").exists()


def test_doctor_warns_of_held_out_problems_that_are_trained_on(tmp_path):
    """The job can run, but its evaluation would not be held out."""
    finding = look(tmp_path, "eval_dataset.seed=0")["held-out problems"]

    assert finding.verdict is Verdict.WARNING
    assert "16 of them are trained on" in finding.detail


@pytest.mark.parametrize(
    ("setting", "check", "verdict", "said"),
    [
        ("rollout.group_size=1", "settings", Verdict.WARNING, "rollout.group_size is 1, and rloo compares"),
        ("trainer.optimizer.learning_rate=5", "settings", Verdict.WARNING, "learning_rate 5 moves each weight"),
        ("dataset={jsonl: PLACE/two.jsonl, size: 9}", "problems", Verdict.WARNING, "two.jsonl has 2 problems"),
        ("eval_dataset={jsonl: PLACE/two.jsonl, size: 9}", "held-out problems", Verdict.WARNING, "two.jsonl has 2"),
        ("engine.max_length=4", "model", Verdict.FAILED, "4 tokens for prompt and answer"),
        ("fileroot=/proc/nope", "run directory", Verdict.FAILED, "/proc cannot be written"),
        ("model=PLACE", "model", Verdict.FAILED, "holds no complete model"),
        ("model=PLACE", "memory", Verdict.SKIPPED, "see model"),
        ("model=PLACE", "run directory", Verdict.SKIPPED, "see model"),
    ],
)
def test_doctor_finds_mistake(tmp_path: Path, setting: str, check: str, verdict: Verdict, said: str) -> None:
    """What is likely not meant is a warning; the cause of several checks is told once."""
    (tmp_path / "two.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    found = look(tmp_path, setting.replace("PLACE", str(tmp_path)))[check]

    assert found.verdict is verdict
    assert said in found.detail


def test_doctor_refuses_roles_that_exceed_machine(tmp_path):
    """Resources are counted as the run counts them."""
    fits = look(tmp_path, "scheduler.roles={trainer: {cpus: 1}}", "scheduler.local.cpus=1")
    found = look(tmp_path, "scheduler.roles={trainer: {cpus: 3}, proxy: {}}", "scheduler.local.cpus=3")

    assert fits["workers"].verdict is Verdict.OK
    assert found["workers"].verdict is Verdict.FAILED
    assert "4 CPUs" in found["workers"].detail


def test_doctor_counts_all_processes_of_gang(tmp_path):
    """Each process needs the resources of the role. Several nodes need a trainer that is a cluster job."""
    gang, trainer = "trainer.gang.num_processes=3", "scheduler.roles={trainer: {cpus: 2}}"
    fits = look(tmp_path, gang, trainer, "scheduler.local.cpus=6")
    found = look(tmp_path, gang, trainer, "scheduler.local.cpus=5", "scheduler.slurm.ranks_per_node=1")
    here = look(tmp_path, gang)

    assert fits["workers"].verdict is fits["gang"].verdict is here["gang"].verdict is Verdict.OK
    assert found["workers"].verdict is Verdict.FAILED
    assert found["gang"].verdict is Verdict.WARNING
    assert "all 3 processes" in found["gang"].detail


def test_doctor_reports_missing_cluster(tmp_path, monkeypatch):
    """Slurm's commands are missing, and nodes cannot reach the controller's address."""
    monkeypatch.setenv("PATH", str(tmp_path))
    found = look(tmp_path, "scheduler={type: slurm, address: 'tcp://127.0.0.1:0', roles: {trainer: {}}}")

    assert (Verdict.FAILED, Verdict.WARNING) == (found["slurm"].verdict, found["controller"].verdict)
    assert "PATH" in found["slurm"].detail
    assert found["jobs"].verdict is Verdict.SKIPPED


def test_doctor_names_server_that_does_not_answer(tmp_path):
    """The finding names its URL."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"http://127.0.0.1:{silent.getsockname()[1]}"
    found = look(tmp_path, "rollout.backend=sglang", f"sglang.urls=[{dead}]")

    assert found["sglang server"].verdict is Verdict.FAILED
    assert dead in found["sglang server"].detail


def test_doctor_reports_taken_server_port(tmp_path):
    """A program that listens there would be taken for a server of the run."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = look(tmp_path, "rollout.backend=sglang", f"sglang={{command: [start], port: {port}}}")

    assert found["sglang port"].verdict is Verdict.FAILED
    assert str(port) in found["sglang port"].detail


@pytest.mark.parametrize(("python", "word"), [("python", "does not find"), ("/no/such/python", "cannot be run")])
def test_doctor_reports_server_that_cannot_be_started(tmp_path, python, word):
    """The package is searched in the environment that would run the server."""
    finding = look(tmp_path, "rollout.backend=vllm", f"vllm.python={python}")["vllm server"]

    assert finding.verdict is Verdict.FAILED
    assert word in finding.detail
    assert "vllm.python" in finding.advice


@pytest.mark.parametrize(
    ("code", "verdict", "word"),
    [
        ("__version__ = '0.99.0'", Verdict.OK, "imports vllm 0.99.0"),
        ("__version__ = '0.1.0'", Verdict.FAILED, "vllm 0.1.0; "),
        ("import absent_kernels", Verdict.FAILED, "No module named 'absent_kernels'"),
        ("import os; os.abort()", Verdict.FAILED, "SIGABRT"),
        ("import time; time.sleep(60)", Verdict.FAILED, "did not import vllm within 1 s"),
    ],
    ids=["good", "old", "broken", "crashes", "hangs"],
)
def test_doctor_imports_package_of_server(tmp_path, code, verdict, word):
    """The check imports it as the server would, so that broken installations are found."""
    (tmp_path / "vllm.py").write_text(code)
    overrides = [f"vllm.python={sys.executable}", f"vllm.environment={{PYTHONPATH: {tmp_path}}}"]
    overrides += ["vllm.start_timeout_seconds=1"] if "sleep" in code else []
    finding = look(tmp_path, "rollout.backend=vllm", *overrides)["vllm server"]

    assert finding.verdict is verdict
    assert word in finding.detail
    assert (verdict is Verdict.OK) != ("vllm.python" in finding.advice)


def test_doctor_warns_of_settings_without_effect(tmp_path):
    """The job can run; each setting is named with the reason."""
    result = run(EXAMPLE, "--json", f"fileroot={tmp_path}", "trainer.objective.kl.estimator=k2")
    found = {each["check"]: each for each in map(json.loads, result.output.splitlines())}

    assert result.exit_code == 0
    assert found["settings"]["verdict"] == "warning"
    assert found["settings"]["detail"].startswith("trainer.objective.kl.estimator has no effect: ")


def test_doctor_predicts_memory_of_devices(tmp_path):
    """A GPU that this machine lacks is reported as elsewhere; a teacher counts with the trainer that loads it."""
    distillation = ["phases=[distillation]", "distillation={teacher: {model: tiny}}"]
    result = run(EXAMPLE, f"fileroot={tmp_path}", "trainer.device=cuda:1", "engine.device=cpu", *distillation)
    here, elsewhere = [line for line in result.output.splitlines() if " predicted" in line]

    assert "engine" in here
    assert "trainer" not in here
    assert "predicted elsewhere: trainer" in elsewhere
    assert "teacher" in elsewhere
    assert re.search(r"activations recompute, and kept by [1-9]\d* layers in memory that is free otherwise", elsewhere)


def test_doctor_predicts_insufficient_memory(tmp_path):
    """The finding names the part that is too large, and settings that reduce it."""
    result = run(EXAMPLE, f"fileroot={tmp_path}", "engine.max_concurrent=1000000", "engine.max_length=100000")

    (line,) = [line for line in result.output.splitlines() if line.startswith("failed") and "memory" in line]
    assert "keys and values up to" in line
    assert "a lower engine.max_concurrent" in result.output
    assert result.exit_code == 1
