"""Groups and conversations of a run: rows and sampled conversations are one list, and each answer has its numbers."""

from __future__ import annotations

import pytest
from tests.stacks.run_files import write_lines

from areal_actors.dashboard.records import format_record
from areal_actors.viewer import view_run
from areal_actors.viewer.conversations import GroupFilter, Trait, find_first_line


def list_groups(directory, **wanted):
    return view_run(directory).conversations.list_groups(GroupFilter(**wanted))


def test_groups_list_rewards_by_problem(directory):
    """Problems are in numerical order, with their first line; one of which only a conversation was kept is a group."""
    conversations = view_run(directory).conversations

    listed = conversations.list_groups(GroupFilter(version=1))["groups"]
    assert [("0", [0.0, 1.0], True), ("11", [1.0, 1.0], False)] == [
        (group["task"], group["rewards"], group["has_tokens"]) for group in listed
    ]
    assert "document.title" in listed[0]["problem"]
    assert "tools" == listed[1]["problem"]
    assert ["7"] == [group["task"] for group in conversations.list_groups(GroupFilter(version=2))["groups"]]
    assert [] == conversations.list_groups(GroupFilter(version=5))["groups"]
    assert [] == conversations.list_groups(GroupFilter(kind="eval-rollout"))["groups"]


@pytest.mark.parametrize(
    ("wanted", "tasks"),
    [
        ({}, ["7", "easy-3", "0", "11"]),
        ({"query": "ANSWER 1"}, ["easy-3", "0", "11"]),
        ({"query": "easy"}, ["easy-3"]),
        ({"query": "FOUR"}, ["0"]),  # of a conversation
        ({"query": "five"}, []),
        ({"trait": Trait.EQUAL}, ["11"]),
        ({"trait": Trait.DIFFERENT, "low": 0.1, "source": ""}, ["7", "0"]),
        ({"trait": Trait.FAILED}, ["7"]),
        ({"trait": Trait.UNTRAINED}, ["0"]),
        ({"low": 0.6}, ["7", "11"]),
        ({"low": 0.25, "high": 0.5}, ["easy-3", "0"]),
        ({"source": "easy"}, ["easy-3"]),
        ({"source": "hard"}, []),
    ],
)
def test_groups_are_filtered_over_versions(directory, wanted, tasks):
    """By text, rewards, the range of their mean and the source; the newest version is first."""
    path = directory.rollouts / "2" / "easy-3.jsonl"
    path.parent.mkdir()
    path.write_bytes((directory.rollouts / "1" / "0.jsonl").read_bytes())

    found = list_groups(directory, **wanted)

    assert tasks == [group["task"] for group in found["groups"]]
    assert not found["is_cut"]


def test_group_has_its_episodes(directory):
    """With the distance to their mean, the conversation of a sampled one, and which ones say the same."""
    conversations = view_run(directory).conversations

    first, second = conversations.read_group("rollout", 1, "0")["episodes"]
    assert (-0.5, 0.5) == (first["above_mean"], second["above_mean"])
    assert (None, 0) == (first["session"], second["session"])
    assert 2 == first["rows"][0]["trained_tokens"]
    rows = [{"sample_idx": sample, "reward": 1.0, "prompt": "p", "completion": "same"} for sample in range(3)]
    write_lines(directory.rollouts / "3" / "5.jsonl", [*rows, rows[0] | {"sample_idx": 3, "completion": "other"}])
    same = [episode["same_as"] for episode in conversations.read_group("rollout", 3, "5")["episodes"]]
    assert [None, 0, 0, None] == same


def test_conversation_belongs_to_the_group_that_it_began_in(directory):
    """A later version may have sampled it, and the same problem may be sampled again even later."""
    (directory.rollouts / "1" / "0.jsonl").rename(directory.rollouts / "1" / "7.jsonl")
    write_lines(directory.rollouts / "5" / "7.jsonl", [{"sample_idx": 1, "reward": 0.0}])
    conversations = view_run(directory).conversations

    assert 1 == conversations.read_group("rollout", 1, "7")["episodes"][1]["session"]
    assert None is conversations.read_group("rollout", 5, "7")["episodes"][0]["session"]
    assert None is conversations.read_group("rollout", 2, "7")


def test_conversation_has_the_advantages_of_its_tokens(directory):
    """And the step that trained them; turns that no step trained have none."""
    conversations = view_run(directory).conversations

    first, second = conversations.read_session(0)["turns"]
    assert (2, [[0.5, 1], [-0.25, 1]]) == (first["step"], first["advantages"])
    assert (None, []) == (second["step"], second["advantages"])
    assert conversations.read_session(2) is None


def test_episodes_say_why_no_step_trained_them(directory):
    """``untrained.jsonl`` is read anew, because a resumed run replaces it; its last line may be growing."""
    conversations = view_run(directory).conversations

    def reasons() -> list[str | None]:
        return [episode["untrained"] for episode in conversations.read_group("rollout", 1, "0")["episodes"]]

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
    """A task is a name, never a path."""
    assert view_run(directory).conversations.read_group("rollout", 1, task) is None


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n2 + 2?\nNow.<|im_end|>\n<|im_start|>assistant\n",
            "2 + 2?",
        ),
        ("<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n", "Hello"),
        ("<s>[INST] Add 1 and 2. [/INST]", "Add 1 and 2."),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n", "hi"),
        ("Question: 1 + 1\nAnswer:", "Question: 1 + 1"),
        ("", ""),
    ],
)
def test_first_line_of_a_problem_is_found_in_a_prompt(prompt, line):
    """Whatever chat template has written it."""
    assert line == find_first_line(prompt)
