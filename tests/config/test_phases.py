"""Phases in a configuration: their sections and steps fit together, or the mistake is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.config import create_config
from areal_actors.errors import ConfigError
from areal_actors.rollouts.staleness import CapacityState
from areal_actors.training.phases import phase_of

BASE = {"experiment_name": "e", "model": "tiny", "total_steps": 10}
SFT = {"jsonl": "data.jsonl"}
DISTILLATION = {"teacher": {"model": "tiny"}}


def create(**settings):
    """A configuration, briefly."""
    return create_config(BASE | settings)


def test_phase_without_steps_takes_the_rest():
    """And each has its own learning rate; all other settings are the run's."""
    config = create(
        phases=["sft", "distillation", "rl"],
        sft=SFT | {"steps": 2, "learning_rate": 0.5},
        distillation=DISTILLATION | {"steps": 3, "coefficient": 2.0, "reward_coefficient": 0.5},
        trainer={"optimizer": {"learning_rate": 0.1, "beta1": 0.8}},
    )

    phases = config.training_phases

    assert [(phase.name, phase.num_steps) for phase in phases] == [("sft", 2), ("distillation", 3), ("rl", 5)]
    assert [phase.config.optimizer.learning_rate for phase in phases] == [0.5, 0.1, 0.1]
    assert {phase.config.optimizer.beta1 for phase in phases} == {0.8}
    assert (phases[1].teacher_coefficient, phases[1].reward_coefficient) == (2.0, 0.5)
    assert config.plan.num_warm_steps == 2


def test_default_phase_is_rl():
    """As it always was."""
    config = create()

    (phase,) = config.training_phases
    assert (phase.name, phase.num_steps, phase.config) == ("rl", 10, config.trainer)
    assert config.limits.max_groups == 10 * config.batch_size


MISTAKES = {
    "an unknown phase": (
        {"phases": ["stf", "rl"]},
        r"phases.0 must be one of sft, distillation, rl, not 'stf'; did you",
    ),
    "no phase": ({"phases": []}, r"phases names no phase; use \[rl\], \[sft, rl\]"),
    "a phase twice": ({"phases": ["rl", "rl"]}, r"phases names a phase twice"),
    "sft after rl": ({"phases": ["rl", "sft"], "sft": SFT}, r"phases has sft after a phase in which agents run"),
    "no section": ({"phases": ["sft", "rl"]}, r"phases names sft, and there is no section sft; add it"),
    "no steps": ({"phases": ["sft", "rl"], "sft": SFT}, r"leaves open how long sft and rl are; set sft.steps"),
    "too many steps": (
        {"phases": ["sft", "rl"], "sft": SFT | {"steps": 10}},
        r"leaves no steps for rl: sft has 10, and total_steps is 10",
    ),
    "a wrong sum": (
        {"phases": ["sft"], "sft": SFT | {"steps": 4}},
        r"do not add up: sft has 4 steps, and total_steps is 10",
    ),
    "a reference": (
        {"phases": ["sft", "rl"], "sft": SFT | {"steps": 1}, "trainer": {"objective": {"kl": {"coefficient": 0.1}}}},
        r"trainer.objective.kl would pull back to the model before it",
    ),
    "dropped groups": (
        {
            "phases": ["distillation"],
            "distillation": DISTILLATION,
            "trainer": {"advantages": {"drop_zero_variance": True}},
        },
        r"set advantages.drop_zero_variance to false",
    ),
    "two sources": ({"sft": SFT | {"run": "runs/a"}}, r"sft name one source of conversations, jsonl or run"),
    "a reward without a run": ({"sft": SFT | {"min_reward": 1.0}}, r"min_reward chooses rollouts of a run"),
    "no teacher": ({"distillation": {}}, r"distillation.teacher is missing"),
    "an empty teacher": ({"distillation": {"teacher": {}}}, r"name the model of the teacher, or the url of a server"),
    "an alignment": (
        {"distillation": {"teacher": {"model": "tiny", "align": "text"}}},
        r"distillation.teacher.align is not a setting",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_contradicting_phases_are_refused(what):
    """Before anything is loaded."""
    settings, message = MISTAKES[what]

    with pytest.raises(ConfigError, match=message):
        create(**settings)


def test_mistake_in_a_phase_is_reported_once():
    """The section is there: nothing says that it is missing, or counts its steps."""
    for wrong in ({"batch_size": 0}, {"stepps": 3}, {"min_reward": 1.0}):
        with pytest.raises(ConfigError) as found:
            create(phases=["sft", "rl"], sft=SFT | {"steps": 3} | wrong)

        (problem,) = found.value.problems
        assert problem.startswith("settings: sft")


@given(warm=st.integers(0, 4), steps=st.integers(1, 5), size=st.integers(1, 3), staleness=st.integers(0, 2))
def test_rollouts_start_after_supervised_steps(warm, steps, size, staleness):
    """No group before, never more than the formula allows from then on, and exactly those that are trained."""
    phases = {"phases": ["sft", "rl"], "sft": SFT | {"steps": warm, "batch_size": 1}} if warm else {}
    rollout = {"max_head_offpolicyness": staleness, "max_concurrent_rollouts": 100}
    config = create(total_steps=warm + steps, batch_size=size, rollout=rollout, **phases)
    state, started = CapacityState.at_version(config.limits, 0), 0
    for version in range(warm + steps):
        state = state.advance(version)
        assert phase_of(config.training_phases, version + 1).name == ("sft" if version < warm else "rl")
        while state.available > 0:
            state, started = state.start().settle(is_accepted=True), started + 1
        assert started == (0 if version < warm else min(steps, version - warm + 1 + staleness) * size)
        assert CapacityState.at_version(config.limits, version).accepted == max(0, version - warm) * size
