"""Errors of actors as plain data."""

from __future__ import annotations

import json

import pytest

from areal_actors.errors import (
    CapacityExhausted,
    ConfigError,
    ContextLengthExceeded,
    NotFound,
    ProtocolError,
    RemoteError,
)
from areal_actors.kernel.failure import error_from_data, error_to_data


@pytest.mark.parametrize(
    "error",
    [
        NotFound("no such session", param="session"),
        CapacityExhausted("full", retry_after_seconds=2.5),
        ContextLengthExceeded(num_tokens=10, max_tokens=5),
        ConfigError(("a", "b")),
        RemoteError("actor", "ValueError", "odd", "Traceback ..."),
    ],
)
def test_error_data_restores_areal_errors(error):
    """Class, text and attributes."""
    received = error_from_data(json.loads(json.dumps(error_to_data(error, "office"))))

    assert type(error) is type(received)
    assert (str(error), error.args, vars(error)) == (str(received), received.args, vars(received))


def test_error_data_of_other_errors_is_text():
    """No exception class of a peer's choosing is looked up."""
    received = error_from_data(error_to_data(ValueError("odd"), "office"))

    assert isinstance(received, RemoteError)
    assert ("office", "ValueError", "odd") == (received.actor, received.type_name, received.message)


@pytest.mark.parametrize("name", ["builtins.SystemExit", "os.system", "areal_actors.errors.ActorStopped", "x"])
def test_error_data_of_unknown_classes_is_a_remote_error(name):
    """Also those that speak of an ask, which a peer cannot know about."""
    error = error_from_data({"error": name, "arguments": ["a", 1], "attributes": {}})

    assert isinstance(error, RemoteError)
    assert (name, "a, 1") == (error.type_name, error.message)


def test_error_data_that_is_malformed_is_refused():
    """It says so, with the data."""
    with pytest.raises(ProtocolError, match="describes no error"):
        error_from_data({"error": 3})


def test_error_data_omits_attributes_that_are_not_plain():
    """A live object cannot be sent, and does not keep the rest from leaving."""
    error = NotFound("gone", param="x")
    error.socket = object()
    error.where = {"rack": [1, 2]}
    received = error_from_data(error_to_data(error, "office"))

    assert {"message": "gone", "param": "x", "where": {"rack": [1, 2]}} == vars(received)
