"""Sessions of any shape learn as one conversation does. The session ``nox -s credit`` runs all jobs on three seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.credit.jobs import CONTRAST, JOBS, run_job

pytestmark = pytest.mark.slow


def test_sub_agent_without_a_reward_learns(tmp_path: Path):
    """The turns that decide are in another conversation than the last answer, on which the reward is set."""
    outcome = run_job(JOBS["sub-agent decides"], tmp_path, seed=1)
    assert outcome.before < 0.1
    assert outcome.after >= 0.95


def test_sub_agent_does_not_learn_if_the_reward_stays_in_one_conversation(tmp_path: Path):
    """Under settings that keep the reward from the sub-agent it learns nothing, so the test above tests something."""
    assert run_job(JOBS["sub-agent decides"], tmp_path, seed=1, **CONTRAST).after < 0.3
