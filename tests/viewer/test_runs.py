"""Reading of run directories: complete, also while they grow, are replaced, or were left by a killed process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.stacks.run_files import write_lines, write_run

from areal_actors.dashboard import RunDirectory
from areal_actors.domain import InteractionId, RewardSet, SampleKey, SessionId, SessionStarted
from areal_actors.errors import RunDirectoryError
from areal_actors.journal import SqliteJournal
from areal_actors.viewer import find_runs, view_run
from areal_actors.viewer.runs import FailureFilter, compare_with_defaults


def test_run_description_has_no_secrets(directory):
    """The settings are shown with their secrets shortened."""
    description = view_run(directory).describe()

    assert 3 == description["steps"]
    assert {"value": "shown", "is_changed": True} == description["all_settings"]["experiment_name"]
    assert "0123456789abcdefghij" not in json.dumps(description, default=str)


def test_failures_are_counted_by_kind_without_secrets(directory):
    """The first traceback of each kind is kept, with what looks like a key shortened."""
    first, second = view_run(directory).list_failures()

    assert ("ValueError: no", 2, 2) == (first["reason"], first["count"], first["last_version"])
    assert "line 9" in first["first"]["traceback"]
    assert "uvwxyz" not in first["first"]["traceback"]
    assert 1 == second["count"]


@pytest.mark.parametrize(
    ("wanted", "counts"),
    [
        ({}, [2, 1]),
        ({"query": "LATE"}, [1]),
        ({"query": "line 9"}, [2]),
        ({"query": "sk-abcdefghijklmnop"}, []),  # of the key in a traceback, of which only a part is shown
        ({"outcome": "failed"}, [2, 1]),
        ({"outcome": "rejected"}, []),
        ({"is_eval": True}, []),
        ({"first_version": 2}, [1]),
        ({"last_version": 1}, [1, 1]),
        ({"source": "easy"}, []),
        ({"source": ""}, [2, 1]),
    ],
)
def test_failures_are_filtered(directory, wanted, counts):
    """By text, kind, purpose, versions and source."""
    assert counts == [kind["count"] for kind in view_run(directory).list_failures(FailureFilter(**wanted))]


def test_failures_name_the_newest_of_each_kind(directory):
    """So that a reader finds their groups and conversations."""
    kind = view_run(directory).list_failures()[0]

    assert [("4", 2), ("4", 1)] == [(one["task_id"], one["version"]) for one in kind["newest"]]


def test_signature_changes_with_each_part(directory):
    """The page reads again only what has changed."""
    run = view_run(directory)
    before = run.signature()
    write_lines(directory.rollouts / "2" / "5.jsonl", [{"reward": 1.0}])
    after = run.signature()

    assert ["groups"] == [part for part in after if after[part] != before[part]]


def test_runs_are_found_below_a_directory(tmp_path: Path, monkeypatch):
    """By experiment and trial; two of one name are told apart by their paths."""
    write_run(tmp_path / "runs" / "a" / "one")
    write_run(tmp_path / "runs" / "b" / "two")
    write_run(tmp_path / "else" / "a" / "one")
    (tmp_path / "runs" / "stray.txt").touch()
    monkeypatch.chdir(tmp_path / "runs" / "a" / "one")

    assert ["a/one"] == list(find_runs([Path()]))
    assert ["a/one", "b/two"] == list(find_runs([tmp_path / "runs"]))
    assert 3 == len(find_runs([tmp_path / "runs", tmp_path / "else"]))
    assert 2 == len(find_runs([tmp_path / "runs", tmp_path / "runs" / "a"]))


def test_path_without_runs_is_refused(tmp_path: Path):
    """An empty directory, and one that does not exist."""
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunDirectoryError, match=path.name):
            find_runs([path])


def test_changed_settings_are_told_from_defaults():
    """Also those of a section that is absent by default; a setting that is null like its default is not changed."""
    found = compare_with_defaults("seed: 1\nbatch_size: 3\ndataset: {jsonl: a.jsonl, seed: 0, size: 5}\nsft: null\n")

    assert ["batch_size", "dataset.jsonl", "dataset.size"] == [path for path, one in found.items() if one["is_changed"]]
    assert {} == compare_with_defaults("a: [")


@pytest.mark.anyio
async def test_sessions_of_a_service_are_read_from_its_journal(tmp_path: Path):
    """While it runs: user, turns and the feedback that came last; without secrets."""
    directory = RunDirectory(path=tmp_path)
    session = SessionId("chat-0-0-AbCdEfGhIjKlMnOpQrStUv")
    started = SessionStarted(
        session=session, key_digest=b"k", sample_key=SampleKey(seed=1, path=()), started_at=5.0, user="ada"
    )
    async with SqliteJournal.open(directory.journal) as journal:
        await journal.write(started)
        for reward in (0.25, 0.75):
            await journal.write(RewardSet(session=session, interaction=InteractionId("a"), reward=reward))
        (found,) = view_run(directory).list_served()

    assert ("ada", 5.0, None, 0.75, 1, 0) == tuple(
        found[name] for name in ("user", "started_at", "ended_at", "reward", "num_rewards", "num_turns")
    )
    assert "OpQrStUv" not in found["session"]
