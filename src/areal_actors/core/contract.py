"""The contract between an actor class and its protocols: collects the handler table and checks it.

Handlers are collected when the class is created: two handlers for one message, or a handler for a message of a protocol
that the actor does not speak, raise ``ProtocolError`` at import time. Whether *every* message of the protocol has a
handler is checked only when the actor is spawned, because messages may be defined after the actor's class.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

from attrs import frozen

from areal_actors.core.message import AnyMessage, StreamMessage, System, marks_of, messages_of, protocol_of
from areal_actors.errors import ProtocolError

__all__ = ["Handler", "check_complete", "collect_handlers", "protocols_of"]


@frozen(kw_only=True, eq=False)
class Handler:
    """One row of an actor's handler table: the function for a message class, and how it is run."""

    message: type[AnyMessage[Any]]
    function: Callable[[Any, Any], Any]
    concurrency: int
    is_stream: bool


def collect_handlers(actor: type) -> dict[type[AnyMessage[Any]], Handler]:
    """Return the handler table of ``actor``, with methods resolved in method resolution order as Python does.

    Raises:
        ProtocolError: two methods handle one message, or a handled message belongs to a protocol that the actor does
            not name.
    """
    owners: dict[type[AnyMessage[Any]], str] = {}
    table: dict[type[AnyMessage[Any]], Handler] = {}
    allowed = (*protocols_of(actor), System)
    # Base classes first; the method is looked up on ``actor``, so that an override need not repeat the decorator.
    for ancestor in reversed(actor.__mro__):
        for name, member in vars(ancestor).items():
            for mark in marks_of(member):
                _check_owner(actor, mark.message, name, owners)
                _check_protocol(actor, mark.message, allowed)
                owners[mark.message] = name
                table[mark.message] = Handler(
                    message=mark.message,
                    function=getattr(actor, name),
                    concurrency=mark.concurrency,
                    is_stream=issubclass(mark.message, StreamMessage),
                )
    return table


def check_complete(actor: type, table: dict[type[AnyMessage[Any]], Handler]) -> None:
    """Check that every message of the actor's protocols has a handler.

    Raises:
        ProtocolError: names each message without one.
    """
    missing = [
        message.__name__
        for protocol in protocols_of(actor)
        for message in messages_of(protocol)
        if message not in table
    ]
    if missing:
        raise ProtocolError(
            f"{actor.__name__} has no handler for {', '.join(missing)}; add a method under @{missing[0]}.handler"
        )


def protocols_of(actor: type) -> tuple[type, ...]:
    """Return the protocols named in ``class SomeActor(Actor[A | B])``; the nearest ancestor that names any decides."""
    for ancestor in actor.__mro__:
        for base in ancestor.__dict__.get("__orig_bases__", ()):
            argument = _protocol_argument(base)
            if argument is not None:
                return argument
    return ()


def _protocol_argument(base: Any) -> tuple[type, ...] | None:
    if getattr(get_origin(base), "__areal_actor_root__", False) is not True or not get_args(base):
        return None
    (argument,) = get_args(base)
    members = get_args(argument) if get_origin(argument) in (Union, types.UnionType) else (argument,)
    return members if all(isinstance(member, type) for member in members) else None


def _check_owner(
    actor: type, message: type[AnyMessage[Any]], name: str, owners: dict[type[AnyMessage[Any]], str]
) -> None:
    other = owners.get(message, name)
    if other != name:
        raise ProtocolError(
            f"{actor.__name__} handles {message.__name__} twice, in {other}() and {name}(); keep one of them"
        )


def _check_protocol(actor: type, message: type[AnyMessage[Any]], allowed: tuple[type, ...]) -> None:
    protocol = protocol_of(message)
    if protocol not in allowed:
        spoken = " | ".join(known.__name__ for known in allowed[:-1]) or "nothing"
        raise ProtocolError(
            f"{actor.__name__} speaks {spoken}, but handles {message.__name__} of "
            f"{getattr(protocol, '__name__', protocol)}; add that protocol to Actor[...]"
        )
