"""Rows as text, failures, and the sample of conversations: complete, bounded, and right after a resume."""

from __future__ import annotations

import os
import stat
from collections import Counter
from functools import partial

import pytest

from areal_actors.dashboard import (
    FailureWriter,
    RolloutDumper,
    RunDirectory,
    SessionSampler,
    UntrainedWriter,
)
from areal_actors.dashboard.records import read_records
from areal_actors.messages import GroupsTrained


def on_event(listener, *heard):
    """Open, on_event and close."""
    listener.open()
    for item in heard:
        listener.on_event(item)
    listener.close()


def test_rollout_dump_has_one_line_per_row(tmp_path, news, decode):
    """With the promised fields; the prompt is what stands before the first trained token."""
    directory = RunDirectory(path=tmp_path)

    on_event(RolloutDumper(directory, decode=decode), news.episode(7, version=3, member=1), news.episode(7, version=3))

    first, second, *_ = rows = list(read_records(tmp_path / "rollout" / "3" / "7.jsonl"))
    assert len(rows) == 4
    assert first == {
        "task_id": 7,
        "sample_idx": 1,
        "seqlen": 5,
        "prompt_len": 3,
        "head_version": 3,
        "tail_version": 3,
        "reward": 0.5,
        "prompt": " 1 2 3",
        "completion": " 10 11",
        "token_ids": [1, 2, 3, 10, 11],
        "trained": [[3, 5]],
    }
    assert (second["prompt"], second["completion"]) == (" 1 2 4 5", " 12 13 14")


def test_evaluations_are_dumped_separately(tmp_path, news, decode):
    """Below a directory of their own."""
    directory = RunDirectory(path=tmp_path)

    on_event(RolloutDumper(directory, decode=decode), news.episode(7, version=3, is_eval=True), news.step(1))

    assert (tmp_path / "eval-rollout" / "3" / "7.jsonl").exists()
    assert not (tmp_path / "rollout").exists()


def test_resumed_run_dumps_each_episode_once(tmp_path, news, decode):
    """Episodes of the checkpoint's version were not trained and are repeated; its evaluation is not."""
    directory = RunDirectory(path=tmp_path)
    heard = [news.episode(version, version=version, is_eval=e) for version in (1, 2, 3) for e in (True, False)]
    on_event(RolloutDumper(directory, decode=decode), *heard)

    on_event(RolloutDumper(directory, decode=decode, resumed_step=2))

    assert {path.name for path in directory.rollouts.iterdir()} == {"1"}
    assert {path.name for path in directory.eval_rollouts.iterdir()} == {"1", "2"}


def test_untrained_episodes_are_listed_with_the_reason(tmp_path, news):
    """Also over a resumption; what is trained after it leaves the list, and the file goes with the last.

    What is too old is written at the next step, so that a long run does not keep it in memory.
    """
    path = tmp_path / "untrained.jsonl"
    write = partial(UntrainedWriter, path, max_staleness=1, is_replacing=True)
    episodes = [news.episode(task, version=version, member=m) for task, version in ((1, 0), (2, 3)) for m in (0, 1)]
    alone = news.episode(3, version=3)
    evaluated, failed = news.episode(4, is_eval=True), news.episode(5, failure="no answer")
    trained = GroupsTrained(step=4, tasks=("6",))
    on_event(write(), *episodes, alone, news.episode(6, version=3), evaluated, failed, trained)
    reasons = [(record["task_id"], record["sample_idx"], record["reason"]) for record in read_records(path)]

    assert reasons == [
        *(("1", 0, "too_old"), ("1", 1, "too_old")),
        *(("2", 0, "equal_rewards"), ("2", 1, "equal_rewards")),
        ("3", 0, "run_ended"),
    ]
    again = news.episode(2, version=3, is_repeated=True)
    on_event(write(resumed_step=4), again, GroupsTrained(step=5, tasks=("2",)))
    assert ["1", "1", "3"] == [record["task_id"] for record in read_records(path)]
    killed = write(resumed_step=4)
    killed.open()
    assert ["1", "1"] == [record["task_id"] for record in read_records(path)]
    killed.on_event(GroupsTrained(step=6))
    assert ["1", "1", "3"] == [record["task_id"] for record in read_records(path)]
    on_event(write(resumed_step=1), GroupsTrained(step=2, tasks=("1",)))
    assert not path.exists()


@pytest.mark.parametrize("num_written", [0, 30, -10, None], ids=["nothing", "half a line", "all but a bit", "all"])
def test_repeated_episode_is_dumped_once(tmp_path, news, decode, num_written):
    """However much of it was written before the process was killed; others of its group stay as they are."""
    directory = RunDirectory(path=tmp_path)
    path = directory.rollouts / "1" / "7.jsonl"
    on_event(RolloutDumper(directory, decode=decode), news.episode(7, version=1))
    whole = path.read_bytes().replace(b'"tail_version":1', b'"tail_version":4')  # which were lost
    path.unlink()
    on_event(RolloutDumper(directory, decode=decode, resumed_step=3), news.episode(7, version=1, member=1))
    path.write_bytes(path.read_bytes() + whole[:num_written])

    on_event(RolloutDumper(directory, decode=decode, resumed_step=3), news.episode(7, version=1, is_repeated=True))

    rows = list(read_records(path))
    assert [1, 1, 0, 0] == [row["sample_idx"] for row in rows]
    assert {2} == set(Counter(row["completion"] for row in rows).values())
    assert [path] == list(directory.rollouts.rglob("*.jsonl"))


def test_repeated_failure_is_listed_once(tmp_path, news):
    """One that the earlier process did not come to tell is listed as well."""
    path = tmp_path / "failures.jsonl"
    failed = partial(news.episode, 2, version=4, failure="expired")
    on_event(FailureWriter(path), failed(member=3))

    again = (failed(member=member, is_repeated=True) for member in (3, 5))
    on_event(FailureWriter(path, resumed_step=6), *again)

    assert [3, 5] == [record["sample_idx"] for record in read_records(path)]


def test_lone_surrogates_are_written_escaped(tmp_path, news):
    """Models can write what UTF-8 cannot say; the file stays readable."""
    directory = RunDirectory(path=tmp_path)

    on_event(RolloutDumper(directory, decode=lambda _: "\ud800"), news.episode())

    assert next(read_records(tmp_path / "rollout" / "0" / "0.jsonl"))["prompt"] == "\ud800"


def test_failures_are_written_with_their_reason(tmp_path, news):
    """Episodes that went well are not listed."""
    path = tmp_path / "failures.jsonl"

    on_event(
        FailureWriter(path), news.episode(1), news.episode(2, version=4, member=3, failure="Agent.run raised KeyError")
    )

    (record,) = read_records(path)
    assert (record["task_id"], record["sample_idx"], record["version"]) == ("2", 3, 4)
    assert record["failure"] == "Agent.run raised KeyError"
    assert record["traceback"] is None


def test_sampled_session_has_its_tokens(tmp_path, news, decode):
    """Each turn with new messages, tokens and logprobs, versions, mask, return, fork; and what was not trained."""
    path = tmp_path / "sessions.jsonl"

    on_event(SessionSampler(path, decode=decode), news.session(5, version=2, text="1 + 2"))

    (record,) = read_records(path)
    first, second, third = record["turns"]
    assert (record["session"], record["version"], record["reward"]) == ("train-5-0-AbCd…", 2, 1.0)
    assert first["tokens"] == [[" 10", 0.0], [" 11", -0.1]]
    assert first["answer"]["tool_calls"] == [{"name": "add", "arguments": '{"a": 1}'}]
    assert (first["versions"], first["mask"], first["return"]) == ([[2, 2]], [[1, 2]], 0.5)
    assert (second["parent"], second["fork"], second["reward"]) == ("turn-1", "template_rewrote_history", 1.0)
    assert (third["status"], third["mask"]) == ("cancelled", [])
    assert record["untrained"] == [{"interaction": "turn-3", "num_tokens": 1, "reason": "cancelled"}]


def test_session_sample_is_bounded_and_spread_over_versions(tmp_path, news, decode):
    """However long the run, at most ``max_sessions`` are kept, from its beginning and from its end."""
    path = tmp_path / "sessions.jsonl"
    heard = [news.session(position, version=version) for version in range(100) for position in range(6)]

    on_event(SessionSampler(path, decode=decode, max_sessions=20), *heard)

    versions = [record["version"] for record in read_records(path)]
    assert 6 <= len(versions) <= 20
    assert max(versions) >= 64
    assert 0 in versions


def test_sampled_session_is_cut_to_its_limits(tmp_path, news, decode):
    """A record says how much it leaves out."""
    path = tmp_path / "sessions.jsonl"

    on_event(SessionSampler(path, decode=decode), news.session(text="x" * 100_000))

    (record,) = read_records(path)
    assert record["turns"][0]["messages"][0]["content"].endswith("(92000 more characters)")


def test_resumed_session_sample_drops_repeated_episodes(tmp_path, news, decode):
    """Sessions of the checkpoint's version and later."""
    path = tmp_path / "sessions.jsonl"
    on_event(SessionSampler(path, decode=decode), *(news.session(version=version) for version in (0, 1, 2)))

    on_event(SessionSampler(path, decode=decode, resumed_step=1), news.session(version=1))

    assert [record["version"] for record in read_records(path)] == [0, 1]


def test_sampled_group_is_complete_and_has_its_advantages(tmp_path, news, decode):
    """That of the first problem of a version, also what the next version sampled of it, and a few other episodes."""
    path = tmp_path / "sessions.jsonl"
    arrived = [(5, 0), (6, 0), (5, 0), (7, 0), (8, 0), (5, 0), (5, 1), (9, 1), (9, 1)]
    sampler = SessionSampler(path, decode=decode)
    trained = [GroupsTrained(step=step, advantages={"turn-1": ((0.5, 2),), "else": ((1.0, 1),)}) for step in (1, 2)]

    on_event(sampler, *(news.session(task, version=version) for task, version in arrived), *trained)

    kept = [(record["task_id"], record["version"]) for record in read_records(path)]
    assert [("5", 0), ("6", 0), ("5", 0), ("7", 0), ("5", 0), ("5", 1), ("9", 1), ("9", 1)] == kept
    advantages = [{"step": step, "turns": {"turn-1": [[0.5, 2]]}} for step in (1, 2)]
    assert advantages == list(read_records(tmp_path / "advantages.jsonl"))
    SessionSampler(path, decode=decode, resumed_step=1).open()
    assert advantages[:1] == list(read_records(tmp_path / "advantages.jsonl"))


def test_run_directory_sets_an_earlier_run_aside(tmp_path):
    """Nothing of it is overwritten, however often a run of the same name is started."""
    directory = RunDirectory(path=tmp_path / "trial")
    moved = []
    for number in range(3):
        directory.path.mkdir()
        directory.metrics.write_text(str(number))
        moved.append(directory.set_aside())

    assert [path.name for path in moved] == ["trial.1", "trial.2", "trial.3"]
    assert [(path / "metrics.jsonl").read_text() for path in moved] == ["0", "1", "2"]
    assert directory.set_aside() is None


def test_files_with_conversations_are_private(tmp_path, news, decode):
    """Whatever the umask of the process is, and after a resumption, too."""
    directory = RunDirectory(path=tmp_path)
    old = os.umask(0)
    try:
        for step in (None, 9):
            for listener in (
                SessionSampler(directory.sessions, decode=decode, resumed_step=step),
                FailureWriter(directory.failures, resumed_step=step),
                RolloutDumper(directory, decode=decode, resumed_step=step),
            ):
                on_event(listener, news.session(1), news.episode(1), news.episode(2, failure="it broke"))
    finally:
        os.umask(old)
    paths = [directory.sessions, directory.failures, *directory.rollouts.rglob("*"), directory.rollouts]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths}

    assert len(paths) >= 5
    assert {(True, 0o700), (False, 0o600)} == modes
