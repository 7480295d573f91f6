"""Messages, replies and errors as plain data."""

from __future__ import annotations

import json

import pytest
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.core import Actor, ActorSystem, Address, Message, Ref, StreamMessage, Wire
from areal_actors.core.ref import Ref as AnyRef
from areal_actors.errors import (
    ActorStopped,
    CapacityExhausted,
    ConfigError,
    ContextLengthExceeded,
    NotFound,
    ProtocolError,
    RemoteError,
)


class Post:
    """Address of a post office."""


class Other:
    """Address of somebody else."""


@frozen(kw_only=True)
class Stamp:
    value: int
    country: str | None = None


@frozen(kw_only=True)
class Letter(Message[Post, "tuple[Stamp, ...]"]):
    text: str = ""
    stamps: tuple[Stamp, ...] = ()
    weights: dict[str, float] = field(factory=dict)
    answer_to: Ref[Post] | None = None


@frozen(kw_only=True)
class Track(StreamMessage[Post, Stamp]):
    code: int


@frozen(kw_only=True)
class Foreign(Message[Other, None]):
    pass


class Office(Actor[Post]):
    @Letter.handler
    async def send(self, message: Letter) -> tuple[Stamp, ...]:
        return message.stamps

    @Track.handler
    async def track(self, message: Track):
        yield Stamp(value=message.code)


def resolve(address: Address) -> AnyRef:
    raise ActorStopped(f"{address.name} is not here")


stamps = st.builds(Stamp, value=st.integers(), country=st.none() | st.text(max_size=4))
letters = st.builds(
    Letter,
    text=st.text(max_size=8),
    stamps=st.lists(stamps, max_size=3).map(tuple),
    weights=st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=3),
)


@given(letters)
def test_messages_survive_the_wire(letter):
    """Also through JSON, which knows neither tuples nor classes."""
    wire = Wire(Post, resolve=resolve)
    data = json.loads(json.dumps(wire.message_to_data(letter)))

    assert letter == wire.message_from_data(data)
    assert ("Post", "Letter") == (data["protocol"], data["message"])


@given(st.lists(stamps).map(tuple))
def test_replies_survive_the_wire(reply):
    """The message says what type to expect, a name given as a string included."""
    wire = Wire(Post, resolve=resolve)

    assert reply == wire.reply_from_data(Letter, json.loads(json.dumps(wire.reply_to_data(Letter, reply))))


def test_items_of_streams_survive_the_wire():
    """They are replies, many of them."""
    wire = Wire(Post, resolve=resolve)

    assert Stamp(value=3) == wire.reply_from_data(Track, wire.reply_to_data(Track, Stamp(value=3)))


def test_unknown_fields_are_ignored():
    """A newer peer may say more."""
    wire = Wire(Post, resolve=resolve)
    data = {"protocol": "Post", "message": "Track", "body": {"code": 3, "colour": "red"}}

    assert Track(code=3) == wire.message_from_data(data)


@pytest.mark.anyio
async def test_a_ref_travels_as_its_address_and_arrives_alive():
    """Within its own process it becomes the very same ref."""
    async with ActorSystem.open(name="here") as system:
        ref = await system.spawn(Office(), name="office")
        wire = Wire(Post, resolve=system.resolve)
        data = json.loads(json.dumps(wire.message_to_data(Letter(answer_to=ref))))

        assert {"node": "here", "name": "office", "incarnation": 1} == data["body"]["answer_to"]
        assert wire.message_from_data(data).answer_to is ref
        await ref.stop()
        with pytest.raises(ActorStopped, match="no actor 'office'"):
            wire.message_from_data(data)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({}, "no protocol None passes here; known are Post"),
        ({"protocol": "Other", "message": "Foreign", "body": {}}, "no protocol 'Other' passes"),
        ({"protocol": ["Post"], "message": "Letter", "body": {}}, "no protocol"),
        ({"protocol": "Post", "message": "Parcel", "body": {}}, "no message 'Parcel'; it has Letter, Track"),
        ({"protocol": "Post", "message": "Track", "body": {}}, "Track does not fit its class: required field missing"),
        ({"protocol": "Post", "message": "Track", "body": {"code": "x"}}, r"invalid value for type.*@ \$.code"),
        ({"protocol": "Post", "message": "Track", "body": None}, "Track does not fit"),
        ({"protocol": "Post", "message": "Track", "body": [1]}, "Track does not fit"),
    ],
)
def test_malformed_messages_are_refused_with_their_fault(data, complaint):
    """Whatever a stranger sends, the answer is a ``ProtocolError`` that says what was wrong."""
    with pytest.raises(ProtocolError, match=complaint):
        Wire(Post, resolve=resolve).message_from_data(data)


def test_foreign_messages_do_not_leave():
    """A wire carries the protocols it was made for."""
    with pytest.raises(ProtocolError, match="Foreign belongs to no protocol of this wire"):
        Wire(Post, resolve=resolve).message_to_data(Foreign())


def test_protocols_of_one_name_are_refused():
    """Their messages could not be told apart."""
    twin = type("Post", (), {})
    with pytest.raises(ProtocolError, match="two protocols are named Post"):
        Wire(Post, twin, resolve=resolve)


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
def test_errors_on_purpose_survive_the_wire(error):
    """Class, text and attributes."""
    wire = Wire(Post, resolve=resolve)
    received = wire.error_from_data(json.loads(json.dumps(wire.error_to_data(error, "office"))))

    assert type(error) is type(received)
    assert (str(error), error.args, vars(error)) == (str(received), received.args, vars(received))


def test_any_other_error_travels_as_text():
    """No exception class of a peer's choosing is looked up."""
    wire = Wire(Post, resolve=resolve)
    received = wire.error_from_data(wire.error_to_data(ValueError("odd"), "office"))

    assert isinstance(received, RemoteError)
    assert ("office", "ValueError", "odd") == (received.actor, received.type_name, received.message)


@pytest.mark.parametrize("name", ["builtins.SystemExit", "os.system", "areal_actors.errors.ActorStopped", "x"])
def test_unknown_error_classes_become_remote_errors(name):
    """Also those that speak of an ask, which a peer cannot know about."""
    error = Wire(Post, resolve=resolve).error_from_data({"error": name, "arguments": ["a", 1], "attributes": {}})

    assert isinstance(error, RemoteError)
    assert (name, "a, 1") == (error.type_name, error.message)


def test_data_that_describes_no_error_is_refused():
    """It says so, with the data."""
    with pytest.raises(ProtocolError, match="describes no error"):
        Wire(Post, resolve=resolve).error_from_data({"error": 3})


def test_attributes_that_are_no_plain_data_stay_at_home():
    """A live object cannot be sent, and does not keep the rest from leaving."""
    error = NotFound("gone", param="x")
    error.socket = object()
    error.where = {"rack": [1, 2]}
    wire = Wire(Post, resolve=resolve)
    received = wire.error_from_data(wire.error_to_data(error, "office"))

    assert {"message": "gone", "param": "x", "where": {"rack": [1, 2]}} == vars(received)
