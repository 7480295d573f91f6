"""Typed messages between actors, and the decorator that binds a handler to a message.

A message names two things in its type: the protocol (the address it may be sent to) and the type of its reply::

    class Capacity:
        '''Address of the capacity granter.'''

    @frozen(kw_only=True)
    class Grant(Message[Capacity, Granted]):
        n: int = 1

For the type checker, ``Ref[Capacity].ask(Grant())`` returns a ``Granted``, and no other mailbox takes a ``Grant``. Both
parameters are phantom types: no value is stored for them. A message registers with its protocol when attrs has built
the class, so that an actor can be checked for completeness and the wire can find classes by name.

Handlers are collected into an actor's table when its class is created: two handlers for one message, or a handler for a
message of a protocol that the actor does not speak, raise ``ProtocolError`` at import time. Whether *every* message of
the protocol has a handler is checked only when the actor is spawned, because messages may be defined after the class.
"""

from __future__ import annotations

import sys
import types
from collections.abc import AsyncIterator, Callable, Coroutine
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, ForwardRef, Generic, Self, TypeAlias, TypeVar, Union, get_args, get_origin, overload

import attrs

from areal_actors.errors import ProtocolError

P_co = TypeVar("P_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)
Item_co = TypeVar("Item_co", covariant=True)
A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])

_MARKS = "__areal_handles__"
_REGISTRY = "__areal_messages__"


@attrs.frozen(kw_only=True)
class Address:
    """The location of an actor: node (the system's name), the actor's name on that node, and its incarnation.

    ``incarnation`` counts from 1 and grows with each restart.
    """

    node: str
    name: str
    incarnation: int = 1


@attrs.frozen(kw_only=True)
class HandlerMark:
    """The mark that ``@SomeMessage.handler`` leaves on a function: which message it handles, and how many at a time."""

    message: MessageClass
    concurrency: int


class AnyMessage(Generic[P_co]):
    """Base of both kinds of messages: a protocol, a registry entry and the binding of handlers."""

    __slots__ = ()

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        """Register the class with its protocol; attrs calls this once the final class exists."""
        protocol = protocol_of(cls)
        if protocol is None:
            return
        registry = protocol.__dict__.get(_REGISTRY)
        if registry is None:
            registry = {}
            setattr(protocol, _REGISTRY, registry)
        registry[cls.__qualname__] = cls

    @classmethod
    def _bind(cls, function: F, concurrency: int) -> F:
        """Mark ``function`` as the handler of this message.

        Raises:
            ProtocolError: the message is not a frozen attrs class with a protocol, or ``concurrency`` is below one.
        """
        # Checked in the class's own ``__dict__``: a subclass without the decorator would inherit the attribute.
        if "__attrs_attrs__" not in cls.__dict__ or protocol_of(cls) is None:
            raise ProtocolError(
                f"{cls.__name__} cannot have handlers; make it @frozen(kw_only=True) and name its protocol, "
                f"as in class {cls.__name__}(Message[SomeProtocol, SomeReply])"
            )
        if concurrency < 1:
            raise ProtocolError(f"the handler of {cls.__name__} has concurrency={concurrency}; give at least 1")
        marks: tuple[HandlerMark, ...] = getattr(function, _MARKS, ())
        setattr(function, _MARKS, (*marks, HandlerMark(message=cls, concurrency=concurrency)))
        return function


MessageClass: TypeAlias = type[AnyMessage[Any]]
"""The class of any message."""


class Message(AnyMessage[P_co], Generic[P_co, R_co]):
    """A message to ask (with one reply of type ``R_co``) or to tell (without a reply).

    Subclasses are frozen attrs classes.
    """

    __slots__ = ()

    @overload
    @classmethod
    def handler(
        cls, function: Callable[[A, Self], Coroutine[Any, Any, R_co]], /
    ) -> Callable[[A, Self], Coroutine[Any, Any, R_co]]: ...

    @overload
    @classmethod
    def handler(
        cls, /, *, concurrency: int
    ) -> Callable[
        [Callable[[A, Self], Coroutine[Any, Any, R_co]]],
        Callable[[A, Self], Coroutine[Any, Any, R_co]],
    ]: ...

    @classmethod
    def handler(cls, function: Callable[..., Any] | None = None, /, *, concurrency: int = 1) -> Any:
        """Bind an ``async def`` method to this message.

        With ``concurrency=1`` (the default) the actor runs nothing else while the handler runs. With a higher value,
        each message is handled in a task, up to that many at once; further ones wait without delaying messages of other
        kinds.

        Raises:
            ProtocolError: the function is not a coroutine function, or the message is not a frozen attrs class.
        """

        def bind(method: Callable[..., Any]) -> Callable[..., Any]:
            if not iscoroutinefunction(method):
                raise ProtocolError(f"{method.__qualname__} handles {cls.__name__} and must be a plain 'async def'")
            return cls._bind(method, concurrency)

        return bind if function is None else bind(function)


class StreamMessage(AnyMessage[P_co], Generic[P_co, Item_co]):
    """A message that is answered by a stream of ``Item_co``. It can only be streamed, not asked or told."""

    __slots__ = ()

    @overload
    @classmethod
    def handler(
        cls, function: Callable[[A, Self], AsyncIterator[Item_co]], /
    ) -> Callable[[A, Self], AsyncIterator[Item_co]]: ...

    @overload
    @classmethod
    def handler(
        cls, /, *, concurrency: int
    ) -> Callable[[Callable[[A, Self], AsyncIterator[Item_co]]], Callable[[A, Self], AsyncIterator[Item_co]]]: ...

    @classmethod
    def handler(cls, function: Callable[..., Any] | None = None, /, *, concurrency: int = 1) -> Any:
        """Bind an async generator method to this message; ``concurrency`` as in ``Message.handler``.

        Raises:
            ProtocolError: the function is not an async generator, or the message is not a frozen attrs class.
        """

        def bind(method: Callable[..., Any]) -> Callable[..., Any]:
            if not isasyncgenfunction(method):
                raise ProtocolError(f"{method.__qualname__} handles {cls.__name__} and must 'yield' from 'async def'")
            return cls._bind(method, concurrency)

        return bind if function is None else bind(function)


def protocol_of(message: MessageClass) -> type | None:
    """Return the protocol that a message class names, or ``None`` while it is still a type variable."""
    protocol = _argument(message, 0)
    return protocol if isinstance(protocol, type) else None


def reply_of(message: MessageClass) -> Any:
    """Return the type of a message's reply (for streams, of an item); string annotations are resolved in its module."""
    reply = _argument(message, 1)
    if isinstance(reply, ForwardRef):
        # Safe to evaluate: the string comes from the source code of the message's own module, never from a peer.
        reply = eval(reply.__forward_arg__, vars(sys.modules[message.__module__]))  # noqa: S307
    return reply


def messages_of(protocol: type) -> tuple[MessageClass, ...]:
    """Return all messages registered with ``protocol`` so far, in order of definition."""
    registry: dict[str, MessageClass] = protocol.__dict__.get(_REGISTRY, {})
    return tuple(registry.values())


def _argument(message: MessageClass, position: int) -> Any:
    for ancestor in message.__mro__:
        for base in ancestor.__dict__.get("__orig_bases__", ()):
            if get_origin(base) in (Message, StreamMessage):
                return get_args(base)[position]
    return None


# ------------------------------------------------------------------------------------------------------------- handlers


@attrs.frozen(kw_only=True, eq=False)
class Handler:
    """One row of an actor's handler table: the function for a message class, and how it is run."""

    message: MessageClass
    function: Callable[[Any, Any], Any]
    concurrency: int
    is_stream: bool


def collect_handlers(actor: type) -> dict[MessageClass, Handler]:
    """Return the handler table of ``actor``, with methods resolved in method resolution order as Python does.

    Raises:
        ProtocolError: two methods handle one message, or a handled message belongs to a protocol that the actor does
            not name.
    """
    owners: dict[MessageClass, str] = {}
    table: dict[MessageClass, Handler] = {}
    allowed = protocols_of(actor)
    # Base classes first; the method is looked up on ``actor``, so that an override need not repeat the decorator.
    for ancestor in reversed(actor.__mro__):
        for name, member in vars(ancestor).items():
            marks: tuple[HandlerMark, ...] = getattr(member, _MARKS, ())
            for mark in marks:
                other = owners.get(mark.message, name)
                if other != name:
                    raise ProtocolError(
                        f"{actor.__name__} handles {mark.message.__name__} twice, in {other}() and {name}(); "
                        "keep one of them"
                    )
                protocol = protocol_of(mark.message)
                if protocol not in allowed:
                    spoken = " | ".join(known.__name__ for known in allowed) or "nothing"
                    raise ProtocolError(
                        f"{actor.__name__} speaks {spoken}, but handles {mark.message.__name__} of "
                        f"{getattr(protocol, '__name__', protocol)}; add that protocol to Actor[...]"
                    )
                owners[mark.message] = name
                table[mark.message] = Handler(
                    message=mark.message,
                    function=getattr(actor, name),
                    concurrency=mark.concurrency,
                    is_stream=issubclass(mark.message, StreamMessage),
                )
    return table


def check_complete(actor: type, table: dict[MessageClass, Handler]) -> None:
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
            if getattr(get_origin(base), "__areal_actor_root__", False) is not True or not get_args(base):
                continue
            (argument,) = get_args(base)
            members = get_args(argument) if get_origin(argument) in (Union, types.UnionType) else (argument,)
            if all(isinstance(member, type) for member in members):
                return tuple(members)
    return ()
