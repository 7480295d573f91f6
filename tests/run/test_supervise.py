"""Restarts are counted, and what a restart would only meet again is told from what it mends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import (
    ActorStopped,
    CaptureViolation,
    EncodingError,
    EngineError,
    GangError,
    ModelError,
    ProtocolError,
    RemoteError,
    TrainingStalled,
    Unavailable,
    Unreachable,
)
from areal_actors.run.supervise import Restarts, find_final
from areal_actors.schedulers.config import RestartsConfig


@given(st.lists(st.floats(0, 20), max_size=30), st.integers(0, 4))
def test_restarts_are_limited_in_every_window(times, most):
    """A restart is refused only if the window before it is full."""
    restarts = Restarts(RestartsConfig(max=most, window_seconds=5.0))
    allowed = []
    for now in sorted(times):
        in_window = [time for time in allowed if time > now - 5.0]
        is_allowed = restarts.allow(now=now)

        assert is_allowed is (len(in_window) < most)
        if is_allowed:
            allowed.append(now)


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (ModelError("none"), True),
        (TrainingStalled("none"), True),
        (EncodingError("GroupsTrained cannot be sent"), True),
        (RemoteError("runner", "EncodingError", "GroupsTrained cannot be sent"), True),
        (RemoteError("runner", "RuntimeError", "what"), False),
        (ProtocolError("a message cannot be read"), False),
        (ActorStopped("gone"), False),
        (Unreachable("gone", sent=True), False),
        (Unavailable("later"), False),
        (EngineError("failed"), False),
        (GangError("a rank is gone"), False),
        (RuntimeError("what"), False),
    ],
)
def test_find_final_returns_errors_that_user_must_fix(error, is_final):
    """Nested groups are searched; the loss of another actor is not final."""
    group = ExceptionGroup("all", [ActorStopped("a"), ExceptionGroup("some", [error])])

    assert (error if is_final else None) is find_final(group)


def test_find_final_returns_invalid_tokens():
    """Another engine would return them, too."""
    violation = CaptureViolation.__new__(CaptureViolation)

    assert violation is find_final(violation)
