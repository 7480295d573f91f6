"""Tokens under random clients: nothing is exported that the engine did not see, and each sampled token once.

A small profile of ``nox -s fuzz_tokens``, which plays a million turns. ``python -m tools.fuzz.tokens --session
family/protocol/number`` replays a session.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import anyio
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from tools.fuzz.clients import CLIENTS
from tools.fuzz.play import Outcome, open_stage

from areal_actors.cache import export_trajectories
from areal_actors.domain import ChatMessage, Completion, FinishReason, Interaction, InteractionStatus, SessionRecord
from areal_actors_testing.exactness import (
    Recorded,
    find_prompt_violations,
    find_return_violations,
    find_row_violations,
)
from areal_actors_testing.families import FAMILIES


async def play(family: str, protocol: str, number: int, max_steps: int = 24, seed: int = 0) -> Outcome:
    """One session on a stage of its own."""
    return await (await open_stage(family)).play(protocol, seed=seed, number=number, max_steps=max_steps)


@pytest.mark.anyio
async def test_rows_of_random_clients_are_what_was_sampled(anyio_backend_name: str) -> None:
    """Every protocol with six families, others on each event loop: no violation."""
    counts: Counter[str] = Counter()
    for family in random.Random(anyio_backend_name).sample(sorted(FAMILIES), 6):
        stage = await open_stage(family)
        for number, protocol in itertools.product(range(2), CLIENTS):
            outcome = await stage.play(protocol, seed=len(anyio_backend_name), number=number)
            counts += outcome.counts

            assert [] == outcome.violations, (family, protocol, number)

    assert counts["sampled"] >= counts["trained"] > 0
    assert counts["links judged"] >= counts["linked"] > 0


@settings(max_examples=15)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    protocol=st.sampled_from(sorted(CLIENTS)),
    number=st.integers(0, 2**32),
    max_steps=st.integers(1, 24),
)
def test_rows_of_any_session_are_exact(family: str, protocol: str, number: int, max_steps: int) -> None:
    """Hypothesis looks for a shorter session with a violation."""
    outcome = anyio.run(play, family, protocol, number, max_steps)
    note("\n".join(map(repr, outcome.requests)))

    assert [] == outcome.violations


# ------------------------------------------------------------------------------- the oracle sees what is wrong


def recorded(prompt: list[int], token_ids: list[int], logprob: float = -0.5) -> Recorded:
    """What an engine wrote down."""
    return Recorded(
        prompt=prompt, token_ids=token_ids, logprobs=[logprob] * len(token_ids), versions=[1] * len(token_ids)
    )


def interaction(
    name: str, seen: Recorded, *, order: int = 0, parent: str | None = None, suffix: int = 0
) -> Interaction:
    """An interaction that is what the engine wrote down."""
    return Interaction(
        id=name,
        order=order,
        parent=parent,
        token_parent=parent,
        prompt_suffix=seen.prompt[suffix:],
        num_prompt_tokens=len(seen.prompt),
        completion=Completion(
            token_ids=seen.token_ids,
            logprobs=seen.logprobs,
            raw_logprobs=seen.logprobs,
            versions=seen.versions,
            finish=FinishReason.STOP,
        ),
        output=ChatMessage(role="assistant", content=name),
        status=InteractionStatus.COMPLETED,
        completed_order=order,
        reward=1.0,
    )


FIRST, SECOND = recorded([1, 2], [3, 4]), recorded([1, 2, 3, 4, 5], [6], -1.5)
LOG = {"a": FIRST, "b": SECOND}
RECORD = SessionRecord(
    id="s", interactions=(interaction("a", FIRST), interaction("b", SECOND, order=1, parent="a", suffix=4))
)


def rows(style: str, discount: float = 0.5):
    """The rows of the record."""
    return export_trajectories(RECORD, discount=discount, style=style).trajectories


@pytest.mark.parametrize("style", ["individual", "concat", "tree"])
def test_an_exact_export_has_no_violation(style: str) -> None:
    """All styles satisfy the oracle."""
    assert not list(find_prompt_violations(RECORD, LOG))
    assert not list(find_row_violations(rows(style), (), LOG))


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ({**LOG, "b": recorded([1, 2, 9, 4, 5], [6], -1.5)}, "ids"),
        ({**LOG, "b": recorded([1, 2, 3, 4, 5], [7], -1.5)}, "ids"),
        ({**LOG, "b": recorded([1, 2, 3, 4, 5], [6], -1.25)}, "logprobs"),
        ({**LOG, "c": recorded([1], [2, 3])}, "c: 2 tokens sampled, 0 trained, 0 listed"),
        ({"a": FIRST}, "which the engine never saw"),
    ],
)
@pytest.mark.parametrize("style", ["individual", "concat", "tree"])
def test_whatever_the_engine_did_not_say_is_a_violation(log: dict[str, Recorded], message: str, style: str) -> None:
    """Other ids, other log-probabilities, tokens that are not accounted for."""
    assert any(message in violation for violation in find_row_violations(rows(style), (), log))


def test_tokens_that_are_trained_twice_are_a_violation() -> None:
    """A row too many."""
    violations = list(find_row_violations([*rows("concat"), *rows("individual")], (), LOG))

    assert any("a: 2 tokens sampled, 4 trained" in violation for violation in violations)


def test_a_token_parent_must_begin_the_prompt() -> None:
    """What the engine saw does not begin with what it sampled before."""
    log = {**LOG, "b": recorded([1, 2, 3, 5, 5], [6])}

    assert any("the prompt, next to" in violation for violation in find_prompt_violations(RECORD, log))


def test_styles_must_agree_on_returns() -> None:
    """One discount in one style and another in the other."""
    mixed = {"individual": rows("individual"), "concat": rows("concat", discount=0.25)}

    assert not list(find_return_violations({"individual": rows("individual"), "concat": rows("concat")}))
    assert any("return" in violation for violation in find_return_violations(mixed))
    assert np.isfinite(mixed["concat"][0].returns).all()
