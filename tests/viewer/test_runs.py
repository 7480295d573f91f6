"""Reading of run directories: complete, also while they grow, are replaced, or were left by a killed process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stacks.run_files import step, write_lines, write_run

from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.records import format_record, rewrite_records
from areal_actors.errors import RunDirectoryError
from areal_actors.viewer import RecordFilter, find_runs, view_run


@given(cuts=st.lists(st.integers(0, 400), max_size=8), num_steps=st.integers(0, 6))
def test_growing_metrics_are_read_once(tmp_path_factory, cuts, num_steps):
    """However the writer's bytes are cut into pieces, a reader between them gets each record once, in order."""
    directory = RunDirectory(path=tmp_path_factory.mktemp("run"))
    run = view_run(directory)
    text = b"".join(json.dumps(step(number)).encode() + b"\n" for number in range(num_steps))
    found, cursor, written = [], "", 0
    for end in (*sorted(cut for cut in cuts if cut < len(text)), len(text)):
        with directory.metrics.open("ab") as file:
            file.write(text[written:end])
        written = end
        answer = run.read_metrics(cursor)
        assert not answer["is_restarted"]
        found += answer["records"]
        cursor = answer["cursor"]

    assert [step(number) for number in range(num_steps)] == found


def test_replaced_metrics_are_read_from_the_beginning(directory):
    """A resumed run removes the records of the steps that it repeats."""
    run = view_run(directory)
    cursor = run.read_metrics("")["cursor"]
    rewrite_records(directory.metrics, lambda record: record["step"] < 2)

    answer = run.read_metrics(cursor)

    assert answer["is_restarted"]
    assert [1] == [record["step"] for record in answer["records"]]
    assert not run.read_metrics(answer["cursor"])["records"]


@pytest.mark.parametrize("cursor", ["", "x", "1:2", "::", "0:99999999", "-1:-5"])
def test_metrics_accept_any_cursor(directory, cursor):
    """What a browser sends is not trusted."""
    assert 3 == len(view_run(directory).read_metrics(cursor)["records"])


def test_run_description_has_no_secrets(directory):
    """The settings are shown with their secrets shortened."""
    description = view_run(directory).describe()

    assert 3 == description["steps"]
    assert "experiment_name: shown" in description["config"]
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
    assert counts == [kind["count"] for kind in view_run(directory).list_failures(RecordFilter(**wanted))]


def test_failures_name_the_newest_of_each_kind(directory):
    """So that a reader finds their groups and conversations."""
    kind = view_run(directory).list_failures()[0]

    assert [("4", 2), ("4", 1)] == [(one["task_id"], one["version"]) for one in kind["newest"]]


def test_sessions_are_searched_by_text(directory):
    """The newest is first; a search looks into messages and tokens, in any case."""
    run = view_run(directory)

    assert [2, 1] == [head["version"] for head in run.list_sessions()]
    assert [0] == [head["index"] for head in run.list_sessions("FOUR")]
    assert [] == run.list_sessions("five")
    assert ["a", "b"] == [turn["id"] for turn in run.read_session(0)["turns"]]
    assert run.read_session(2) is None


def test_groups_list_rewards_by_problem(directory):
    """Problems are in numerical order; rows say how far they are above the mean of their group."""
    run = view_run(directory)

    listed = run.list_groups("rollout", 1)["groups"]
    assert [("0", [0.0, 1.0]), ("11", [1.0, 1.0])] == [(group["task"], group["rewards"]) for group in listed]
    assert [-0.5, 0.5] == [row["above_mean"] for row in run.read_group("rollout", 1, "0")]
    assert [2, 2] == [row["trained_tokens"] for row in run.read_group("rollout", 1, "0")]
    assert [] == run.list_groups("rollout", 5)["groups"]
    assert [] == run.list_groups("eval-rollout", 1)["groups"]


@pytest.mark.parametrize(
    ("wanted", "tasks"),
    [
        ({"query": "ANSWER 1"}, ["easy-3", "0", "11"]),
        ({"query": "easy"}, ["easy-3"]),
        ({"query": "five"}, []),
        ({"is_equal": True}, ["11"]),
        ({"is_equal": False, "source": ""}, ["0"]),
        ({"low": 0.6}, ["11"]),
        ({"low": 0.25, "high": 0.5}, ["easy-3", "0"]),
        ({"source": "easy"}, ["easy-3"]),
        ({"source": "hard"}, []),
    ],
)
def test_groups_are_filtered_over_versions(directory, wanted, tasks):
    """By text, equal rewards, the range of their mean and the source; the newest version is first."""
    path = directory.rollouts / "2" / "easy-3.jsonl"
    path.parent.mkdir()
    path.write_bytes((directory.rollouts / "1" / "0.jsonl").read_bytes())

    found = view_run(directory).list_groups("rollout", None, RecordFilter(**wanted))

    assert tasks == [group["task"] for group in found["groups"]]
    assert not found["is_cut"]


def test_rows_of_a_group_say_why_no_step_trained_them(directory):
    """``untrained.jsonl`` is read anew, because a resumed run replaces it; its last line may be growing."""
    run = view_run(directory)

    def reasons() -> list[str | None]:
        return [row["untrained"] for row in run.read_group("rollout", 1, "0")]

    def record(version: int, member: int, reason: str) -> str:
        return format_record(
            {"task_id": "0", "sample_idx": member, "version": version, "head_version": 9, "reason": reason}
        )

    assert reasons() == [None, None]
    late = record(1, 0, "run_ended")
    directory.untrained.write_text(record(0, 0, "too_old") + record(1, 1, "too_old") + late[:9])
    assert reasons() == [None, "too_old"]
    with directory.untrained.open("a") as file:
        file.write(late[9:])
    assert reasons() == ["run_ended", "too_old"]
    directory.untrained.unlink()
    assert reasons() == [None, None]


@pytest.mark.parametrize("task", ["../../metrics", "..", "", "/etc/passwd", "0/../0"])
def test_group_reads_no_file_outside_the_rollouts(directory, task):
    """A task is a number, never a path."""
    assert [] == view_run(directory).read_group("rollout", 1, task)


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
