"""A configuration on its way to a file: whole or not at all, and its secrets for its owner alone."""

from __future__ import annotations

import os
from pathlib import Path

from areal_actors.config import create_config, load_config, save_config

SETTINGS = {
    "experiment_name": "sums",
    "total_steps": 3,
    "model": "tiny",
    "dataset": {"jsonl": "problems.jsonl"},
    "rollout": {"workflow": "agent.py:Agent"},
}


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_file_with_a_key_is_readable_by_its_owner_only(tmp_path):
    """A run directory is often shared, and lies where a whole cluster can read."""
    path = tmp_path / "config.yaml"
    config = create_config({**SETTINGS, "proxy": {"admin_key": "sk-the-key-of-all-keys"}})
    save_config(create_config(SETTINGS), path)
    open_to = mode_of(path)
    save_config(config, path)

    assert 0o666 & ~current_umask() == open_to
    assert 0o600 == mode_of(path)
    assert config == load_config(path)


def test_saved_file_keeps_its_mode(tmp_path):
    """A file that only its owner can read stays private."""
    path = tmp_path / "config.yaml"
    path.touch(mode=0o600)
    save_config(create_config(SETTINGS), path)

    assert 0o600 == mode_of(path)


def current_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
