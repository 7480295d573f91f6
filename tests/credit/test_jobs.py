"""Sessions of any shape learn as one conversation does. The session ``nox -s credit`` runs all jobs on three seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.credit.jobs import CONTRAST, JOBS, run_job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["sub-agent decides", "compaction"])
def test_conversations_without_a_reward_learn(name: str, tmp_path: Path):
    """The turns that decide stand in another conversation than the last answer, on which the reward is set."""
    outcome = run_job(JOBS[name], tmp_path, seed=1)
    assert outcome.before < 0.1
    assert outcome.after >= 0.95


def test_the_job_fails_where_the_reward_stays_in_one_conversation(tmp_path: Path):
    """Under settings that keep the reward from the sub-agent it learns nothing, so the test above tests something."""
    assert run_job(JOBS["sub-agent decides"], tmp_path, seed=1, **CONTRAST).after < 0.3
