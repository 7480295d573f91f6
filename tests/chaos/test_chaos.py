"""A small play of the chaos test, and its judge: what is wrong is seen, and said by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tools.chaos.judge import Evidence, judge, read_evidence, surviving
from tools.chaos.ledger import Ledger, read_ledger
from tools.chaos.play import Profile, play

GOOD = (
    {"kind": "session", "session": "s", "api_key": "k"},
    {"kind": "turn", "session": "s", "interaction": "t", "asked": "a", "answer": "b"},
    {"kind": "wanted", "session": "s", "interaction": "t", "reward": 0.25},
    {"kind": "rewarded", "session": "s", "interaction": "t", "reward": 0.25},
    {"kind": "turn", "session": "s", "interaction": "u", "asked": "c", "answer": "d"},
    {"kind": "wanted", "session": "s", "interaction": None, "reward": 0.5},
    {"kind": "rewarded", "session": "s", "interaction": None, "reward": 0.5},
    {"kind": "final", "session": "s"},
)
EPISODE = {
    "session": "s",
    "member": 0,
    "reward": 0.75,
    "num_rows": 2,
    "sampled": {"t": "digest t", "u": "digest u"},
    "untrained": [],
}


def step(version: int, *episodes: dict[str, Any], life: int = 0) -> dict[str, Any]:
    groups = [{"group": "g", "position": 3, "episodes": list(episodes)}]
    return {"life": life, "event": "trained", "version": version, "groups": groups}


def restored(version: int, life: int) -> dict[str, Any]:
    return {"life": life, "event": "restored", "version": version}


SOUND = Evidence(
    ledgers=GOOD,
    steps=(step(1, EPISODE), restored(0, 1), step(1, EPISODE, life=1)),
    metrics=({"step": 1},),
    dumps={(3, 0): 2},
    sessions={"s": {"group_id": "g"}},
    turns={("s", "t"): ("b", "digest t"), ("s", "u"): ("d", "digest u")},
    rewards={("s", "t"): 0.25, ("s", "u"): 0.5},
    endings={"s": True},
    forgotten=frozenset({"s"}),
    waiting=frozenset(),
    consumed={"g": True},
)
LOST: dict[str, tuple[Callable[[Evidence], Evidence], str]] = {
    "a turn": (lambda e: evolve(e, turns={("s", "u"): e.turns["s", "u"]}), "turn lost: t of s"),
    "an answer": (lambda e: evolve(e, turns={**e.turns, ("s", "t"): ("x", "digest t")}), "turn changed: t"),
    "a reward": (lambda e: evolve(e, rewards={**e.rewards, ("s", "t"): 0.3}), "reward lost: of t of s"),
    "the last reward": (lambda e: evolve(e, rewards={("s", "t"): 0.25}), "reward lost: the last one of s"),
    "a session": (lambda e: evolve(e, sessions={}), "session lost: s"),
    "an end": (lambda e: evolve(e, endings={"s": False}), "end lost: s"),
    "a trajectory": (lambda e: evolve(e, steps=(step(1),)), "trajectory lost: s"),
    "with its weights": (lambda e: evolve(e, steps=(*e.steps, restored(0, 2))), "trajectory lost: s"),
    "a step": (lambda e: evolve(e, steps=(step(2, EPISODE),)), "steps are missing"),
    "a turn on its way to training": (
        lambda e: evolve(e, steps=(step(1, {**EPISODE, "sampled": {"u": "digest u"}}),)),
        "turn not trained: t of s",
    ),
    "a line of metrics": (lambda e: evolve(e, metrics=()), "metrics.jsonl has steps []"),
    "a dumped row": (lambda e: evolve(e, dumps={(3, 0): 1}), "1 rows of s were dumped, 2 were trained"),
    "patience": (
        lambda e: evolve(
            e,
            ledgers=({"kind": "gone", "session": "s", "status": 404, "doing": "ask"},),
            endings={},
            forgotten=frozenset(),
        ),
        "session refused: s is live",
    ),
}


def test_judge_accepts_a_sound_play():
    """Trained by weights that were lost, and again by those that are there: that is once."""
    assert () == judge(SOUND).problems
    assert 1 == judge(SOUND).counts["finalized and trained"]


@pytest.mark.parametrize("what", LOST)
def test_judge_reports_each_kind_of_loss(what: str):
    """Each kind of loss has its sentence."""
    lose, sentence = LOST[what]

    assert any(problem.startswith(sentence) for problem in judge(lose(SOUND)).problems)


def test_judge_reports_sessions_trained_twice():
    """In the lineage of the last weights, whichever life did it."""
    problems = judge(evolve(SOUND, steps=(step(1, EPISODE), restored(1, 1), step(2, EPISODE, life=1)))).problems

    assert "trained 2 times: s" in problems


def test_judge_reports_other_tokens_and_rewards():
    """And so is another reward."""
    wrong = {**EPISODE, "reward": 0.5, "sampled": {"t": "digest t", "u": "other"}}
    problems = judge(evolve(SOUND, steps=(step(1, wrong),))).problems

    assert "trained with reward 0.5, not 0.75: s" in problems
    assert "trained with other tokens than were answered: u of s" in problems


def test_judge_accepts_waiting_and_stale_sessions():
    """Neither is a loss."""
    untrained = evolve(SOUND, steps=(), metrics=())

    assert () == judge(evolve(untrained, waiting=frozenset({"s"}))).problems
    assert () == judge(evolve(untrained, consumed={"g": False})).problems


def test_weights_that_were_not_restored_are_new():
    """A life without a checkpoint begins anew: nothing that an earlier one trained is in its weights."""
    assert [] == surviving([step(1, EPISODE), {**restored(0, 1)}])
    assert [1] == [event["version"] for event in surviving([step(1), step(1, life=1)])]


def test_a_ledger_is_read_as_it_was_written(tmp_path: Path):
    """Line by line, whatever is in it."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.write("turn", session="s", answer="\n\ud800 \x85")
    ledger.write("final", session="s")

    assert ["\n\ud800 \x85", None] == [line.get("answer") for line in read_ledger(tmp_path / "ledger")]


@pytest.mark.slow
def test_acknowledged_requests_survive_kills(tmp_path: Path):
    """Six kills, a third of them of the service, and a restart after each: every acknowledged thing is there once."""
    outcome = play(tmp_path, seed=4, profile=Profile(kills=6, agents=2, batch_size=2, more_steps=1))
    verdict = judge(read_evidence(tmp_path))

    assert () == (*outcome.problems, *verdict.problems)
    assert outcome.kills["service"] >= 2
    assert verdict.counts["turns acknowledged"] > 0 < verdict.counts["sessions trained"]
