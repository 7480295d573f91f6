"""The doctor at a real cluster: jobs that it takes and refuses, and a node that calls the controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_actors.config import load_config
from areal_actors.run.doctor import Verdict, examine

SOURCE = Path(__file__).parents[3] / "src"
EXAMPLE = Path(__file__).parents[3] / "examples" / "slurm.yaml"


@pytest.fixture
def look(cluster, tmp_path, monkeypatch):
    """What is found of the example, with the trainer alone in a job."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)

    def look(role: str, *, has_trial: bool) -> dict[str, tuple[Verdict, str]]:
        overrides = [
            f"fileroot={tmp_path}",
            f"scheduler.address={cluster.address}",
            f"scheduler.roles={{trainer: {role}}}",
            f"scheduler.slurm.setup=['export PYTHONPATH={SOURCE}']",
        ]
        found = examine(load_config(EXAMPLE, overrides), has_trial=has_trial)
        return {finding.check: (finding.verdict, finding.detail) for finding in found}

    return look


def test_trial_job_reaches_the_controller(cluster, look):
    """It ran on a node, and nothing of it is left."""
    found = look("{cpus: 1}", has_trial=True)

    assert found["slurm"][0] is found["job of trainer"][0] is Verdict.OK
    assert found["trial of trainer"][0] is Verdict.OK, found["trial of trainer"][1]
    assert cluster.queue() == []


def test_job_that_no_node_can_take_is_refused(look):
    """Slurm says so before the job waits for ever."""
    verdict, detail = look("{cpus: 5000}", has_trial=False)["job of trainer"]

    assert verdict is Verdict.FAILED
    assert "refuses" in detail


def test_without_a_cluster_other_checks_are_skipped(look, monkeypatch, tmp_path):
    """One line says that it does not answer, instead of one for each role."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere.conf"))
    found = look("{cpus: 1}", has_trial=True)

    assert found["slurm"][0] is Verdict.FAILED
    assert "No Slurm cluster answers here" in found["slurm"][1]
    assert found["jobs"][0] is Verdict.SKIPPED
    assert "job of trainer" not in found
