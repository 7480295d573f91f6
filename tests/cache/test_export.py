"""Training rows by example: which tokens are trained in which row, what is listed instead, and what is refused."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from areal_actors.cache import (
    STYLES,
    Unrewarded,
    export_trajectories,
    from_tensors,
    to_arrays,
    to_tensors,
)
from areal_actors.domain import ChatMessage, SessionRecord, Untrained, UntrainedReason, unfold
from areal_actors.errors import ExportError


def user(text: str) -> ChatMessage:
    """A message of the user."""
    return ChatMessage(role="user", content=text)


def answer(text: str) -> ChatMessage:
    """An answer of the model."""
    return ChatMessage(role="assistant", content=text)


def branching(talk: Any) -> SessionRecord:
    """A ──▶ B ──▶ C and A ──▶ D, with reward 1 on C."""
    talk.turn("a", [user("1")], "A")
    second = [user("1"), answer("A"), user("2")]
    talk.turn("b", second, "B")
    talk.turn("c", [*second, answer("B"), user("3")], "C", tag="critic")
    talk.turn("d", [user("1"), answer("A"), user("4")], "D")
    talk.tree.set_reward("c", 1.0)
    return talk.tree.snapshot()


# ------------------------------------------------------------------------------------------------------ examples


def test_concat_trains_shared_tokens_in_the_first_leaf(talk: Any) -> None:
    """Two leaves share A, which is masked in the second."""
    exported = export_trajectories(branching(talk), discount=0.5, style="concat")
    first, second = exported.trajectories

    assert first.interactions == ("a", "b", "c")
    assert second.interactions == ("a", "d")
    assert (first.num_trained_tokens, second.num_trained_tokens) == (6, 2)
    assert (second.turns == 0).sum() == 2
    assert not second.loss_mask[second.turns == 0].any()
    assert (second.versions[second.turns == 0] == 0).all()
    assert [first.returns[first.turns == turn][0] for turn in range(3)] == [0.125, 0.5, 1.0]
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert (first.tag, second.tag) == ("critic", None)


def test_tree_style_packs_all_branches_into_one_row(talk: Any) -> None:
    """Shared tokens appear once."""
    record = branching(talk)
    (row,) = export_trajectories(record, discount=0.5, style="tree").trajectories
    concat = export_trajectories(record, discount=0.5, style="concat").trajectories
    shared = len(concat[1].input_ids) - (row.num_tokens - len(concat[0].input_ids))

    assert row.interactions == ("a", "b", "c", "d")
    assert row.num_trained_tokens == 8
    assert shared > (concat[1].turns == 0).argmax() + 2
    assert [branch.row.interactions for branch in unfold(row)] == [("a", "b", "c"), ("a", "d")]
    assert [branch.row.reward for branch in unfold(row)] == [1.0, 0.0]


def test_tree_row_is_split_at_the_maximum_length(talk: Any) -> None:
    """A turn that does not fit begins another row, with its context."""
    record = branching(talk)
    longest = max(turn.num_prompt_tokens + 2 for turn in record.interactions)
    first, second = export_trajectories(record, discount=0.5, style="tree", max_tokens=longest).trajectories

    assert (first.interactions, second.interactions) == (("a", "b", "c"), ("a", "d"))
    assert (first.num_trained_tokens, second.num_trained_tokens) == (6, 2)
    assert max(first.num_tokens, second.num_tokens) <= longest


def test_tree_tensors_round_trip_predecessors(talk: Any) -> None:
    """This holds behind left padding as well."""
    (row,) = export_trajectories(branching(talk), discount=0.5, style="tree").trajectories
    arrays = to_arrays([row])
    padded = {name: array if name == "rewards" else np.pad(array, ((0, 0), (3, 0))) for name, array in arrays.items()}
    padded["predecessors"] += 3 * (padded["predecessors"] >= 0) * (np.arange(padded["predecessors"].shape[1]) >= 3)
    (again,) = from_tensors(padded, session="s")

    assert arrays["predecessors"][0].tolist() == row.predecessors.tolist()
    assert arrays["position_ids"][0].tolist() == row.position_ids.tolist()
    assert row.predecessors.tolist() == again.predecessors.tolist()
    assert [b.row.input_ids.tolist() for b in unfold(row)] == [b.row.input_ids.tolist() for b in unfold(again)]
    with pytest.raises(ExportError, match="index of an earlier token"):
        from_tensors(arrays | {"predecessors": arrays["predecessors"][:, ::-1]}, session="s")


def test_forked_tokens_are_a_separate_row(new_talk: Callable[..., Any]) -> None:
    """Returns still reach the turns before the fork."""
    talk = new_talk(rewrites=True)
    talk.turn("1", [user("hi")], evolve(answer("yo"), reasoning="Hm."))
    talk.renderer.keeps_reasoning = False
    talk.turn("2", [user("hi"), answer("yo"), user("more")], "done")
    talk.tree.set_reward(None, 1.0)
    exported = export_trajectories(talk.tree.snapshot(), discount=0.9, style="concat")

    assert [(row.interactions, row.reward) for row in exported.trajectories] == [(("1",), 0.9), (("2",), 1.0)]


def test_untrained_interactions_are_listed_with_a_reason(talk: Any) -> None:
    """They are cancelled, not stored, too long or unrewarded."""
    talk.turn("kept", [user("1")], "A")
    talk.tree.set_reward("kept", 1)
    talk.turn("unstored", [user("1"), answer("A"), user("2")], "BB", store=False)
    talk.turn("below", [user("1"), answer("A"), user("2"), answer("BB"), user("3")], "C")
    talk.turn("long", [user("x" * 100)], "DDD")
    talk.turn("unrewarded", [user("?")], "EEEE")
    for name in ("cut", "silent", "failed", "failed early"):
        talk.begin(name, [user(name)])
    talk.tree.cancel("cut", talk.completion(answer("FFFFF")), answer("FFFFF"))
    talk.tree.cancel("silent")
    talk.tree.fail("failed", "why", talk.completion(answer("GGGGGG")))
    talk.tree.fail("failed early", "why")

    for style in sorted(STYLES):
        exported = export_trajectories(
            talk.tree.snapshot(), discount=1.0, style=style, max_tokens=90, unrewarded=Unrewarded.SKIP
        )
        assert exported.untrained == (
            Untrained(interaction="unstored", num_tokens=3, reason=UntrainedReason.NOT_STORED),
            Untrained(interaction="long", num_tokens=4, reason=UntrainedReason.TOO_LONG),
            Untrained(interaction="unrewarded", num_tokens=5, reason=UntrainedReason.NO_REWARD),
            Untrained(interaction="cut", num_tokens=6, reason=UntrainedReason.CANCELLED),
            Untrained(interaction="failed", num_tokens=7, reason=UntrainedReason.FAILED),
        )
        assert exported.trajectories[-1].interactions[-1] == "below"


def test_too_long_conversation_keeps_the_turns_that_fit(talk: Any) -> None:
    """The leaf is left out."""
    record = branching(talk)
    longest = max(turn.num_prompt_tokens + 2 for turn in record.interactions)
    exported = export_trajectories(record, discount=0.5, style="concat", max_tokens=longest - 1)

    assert [row.interactions for row in exported.trajectories] == [("a", "b"), ("a", "d")]
    assert tuple(entry.interaction for entry in exported.untrained) == ("c",)
    assert exported.trajectories[0].reward == 0.5


def test_chain_of_a_thousand_turns_is_one_row(talk: Any) -> None:
    """Rows are built without recursion."""
    messages = [user("hi")]
    for number in range(1000):
        talk.turn(f"{number}", messages, "yo")
        messages += [answer("yo"), user("m")]
    exported = export_trajectories(talk.tree.snapshot(), discount=1.0, style="concat")

    assert len(exported.trajectories) == 1
    assert sum(row.num_trained_tokens for row in exported.trajectories) == 3000
    assert len(exported.trajectories[0].interactions) == 1000


def test_exported_tensors_have_the_documented_types(talk: Any) -> None:
    """Names, dtypes and shapes are public."""
    import torch

    tensors = to_tensors(export_trajectories(branching(talk), discount=0.5, style="concat").trajectories)
    b, t = tensors["input_ids"].shape

    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "input_ids": (torch.int32, (b, t)),
        "attention_mask": (torch.bool, (b, t)),
        "loss_mask": (torch.int32, (b, t)),
        "logprobs": (torch.float32, (b, t)),
        "versions": (torch.int32, (b, t)),
        "returns": (torch.float32, (b, t)),
        "rewards": (torch.float32, (b,)),
        "temperatures": (torch.float32, (b, t)),
    }


def test_exporting_arrays_does_not_import_torch() -> None:
    """Only tensors need it."""
    code = "import sys; import areal_actors.cache; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ----------------------------------------------------------------------------------------------------- bad input


def damaged(record: SessionRecord, name: str, **fields: Any) -> SessionRecord:
    """The record with one interaction changed."""
    turns = tuple(evolve(t, **fields) if t.id == name else t for t in record.interactions)
    return evolve(record, interactions=turns)


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_prompt_tokens": 3}, "Interaction b was sampled after 3 tokens, but its ancestors hold"),
        ({"prompt_suffix": [1]}, "but its ancestors hold"),
        ({"token_parent": "x"}, "refers to interaction x"),
        ({"token_parent": "b"}, "continues one that was asked later"),
        ({"parent": "x"}, "continues x, which was not completed"),
    ],
)
def test_damaged_records_are_refused(talk: Any, style: str, fields: dict[str, Any], message: str) -> None:
    """The error names the interaction."""
    with pytest.raises(ExportError, match=message):
        export_trajectories(damaged(branching(talk), "b", **fields), discount=1.0, style=style)


def test_columns_of_unequal_length_are_refused(talk: Any) -> None:
    """A missing log-probability is not padded."""
    record = branching(talk)
    completion = evolve(record.interactions[1].completion, logprobs=[-1.0])

    with pytest.raises(ExportError, match="interaction b differ in number"):
        export_trajectories(damaged(record, "b", completion=completion), discount=1.0, style="concat")


def test_export_memory_is_linear_in_the_tokens(talk: Any) -> None:
    """Twice the turns take about twice the memory."""
    messages = [user("1")]
    for turn in range(256):
        talk.turn(f"t{turn}", messages, "A")
        messages = [*messages, answer("A"), user("2")]
    long = talk.tree.snapshot()
    short = evolve(long, interactions=long.interactions[:128])

    def peak(record: SessionRecord) -> int:
        gc.collect()
        tracemalloc.start()
        try:
            to_arrays(export_trajectories(record, discount=0.5, style="concat").trajectories)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(long) < 2.6 * peak(short)
