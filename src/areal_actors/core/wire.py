"""Conversion of messages, replies and errors to plain data and back, for any wire format.

Plain data is ``None``, booleans, numbers, strings, bytes, and lists, tuples and dictionaries of them, which any codec
can encode. A peer cannot choose which classes are constructed. A message is represented by the name of its protocol,
its own name and its fields; a ``Ref`` by its address, which becomes a live ref again where the actor can be reached.
Encoding to bytes and transport are separate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_origin

import attrs
import cattrs
from cattrs.errors import BaseValidationError

from areal_actors.core.failure import leaves, transferred
from areal_actors.core.message import Address, AnyMessage, messages_of, protocol_of, reply_of
from areal_actors.core.ref import Ref
from areal_actors.errors import ActorError, ActorStopped, ArealError, ProtocolError, RemoteError

__all__ = ["Wire"]

_PLAIN = (type(None), bool, int, float, str, bytes)


class Wire:
    """Converter for the messages of some protocols. Protocols and messages are identified by their class names.

    Args:
        protocols: protocols whose messages may pass; all others are refused, with an error that names them.
        resolve: returns a live ref for an address, as ``ActorSystem.resolve`` does.

    Raises:
        ProtocolError: two protocols have the same name.
    """

    def __init__(self, *protocols: type, resolve: Callable[[Address], Ref[Any]]) -> None:
        self._protocols: dict[str, type] = {}
        for protocol in protocols:
            if self._protocols.setdefault(protocol.__name__, protocol) is not protocol:
                raise ProtocolError(f"two protocols are named {protocol.__name__}; rename one, or use two wires")
        self._converter = cattrs.Converter()
        self._converter.register_unstructure_hook_func(_is_ref, lambda ref: attrs.asdict(ref.address))
        self._converter.register_structure_hook_func(
            _is_ref, lambda data, _: resolve(self._converter.structure(data, Address))
        )

    def message_to_data(self, message: AnyMessage[Any]) -> dict[str, Any]:
        """Return ``message`` as ``{"protocol": ..., "message": ..., "body": {...}}``.

        Raises:
            ProtocolError: its protocol is not one of this wire's.
        """
        kind = type(message)
        protocol = protocol_of(kind)
        if protocol is None or self._protocols.get(protocol.__name__) is not protocol:
            raise ProtocolError(f"{kind.__name__} belongs to no protocol of this wire ({self._known()})")
        body = self._converter.unstructure(message, kind)
        return {"protocol": protocol.__name__, "message": kind.__name__, "body": body}

    def message_from_data(self, data: Mapping[str, Any]) -> AnyMessage[Any]:
        """Return the message that ``data`` from ``message_to_data`` describes; unknown fields are ignored.

        Raises:
            ProtocolError: unknown protocol or message, or fields of the wrong shape.
            ActorStopped: a ref in it names an actor that is gone.
        """
        kind = self._kind(data.get("protocol"), data.get("message"))
        message: AnyMessage[Any] = self._structure(data.get("body"), kind, kind.__name__)
        return message

    def reply_to_data(self, message: type[AnyMessage[Any]], reply: Any) -> Any:
        """Return the reply to a ``message`` (for a stream message, an item) as plain data."""
        return self._converter.unstructure(reply, reply_of(message))

    def reply_from_data(self, message: type[AnyMessage[Any]], data: Any) -> Any:
        """Return the reply that ``data`` from ``reply_to_data`` describes.

        Raises:
            ProtocolError: the data does not have the shape that the message declares.
        """
        return self._structure(data, reply_of(message), f"the reply to {message.__name__}")

    def error_to_data(self, error: BaseException, actor: str) -> dict[str, Any]:
        """Return an error of a handler of ``actor`` as plain data, converted by the rules in ``failure``.

        Attributes that are not plain data are omitted; such arguments are converted to text.
        """
        sent = transferred(error, actor)
        attributes = {name: value for name, value in vars(sent).items() if name != "__notes__" and _is_plain(value)}
        arguments = [value if _is_plain(value) else str(value) for value in sent.args]
        return {"error": _name(type(sent)), "arguments": arguments, "attributes": attributes}

    def error_from_data(self, data: Mapping[str, Any]) -> ArealError:
        """Return the error that ``data`` from ``error_to_data`` describes.

        It is a ``RemoteError`` if its class is unknown here.

        Raises:
            ProtocolError: the data does not describe an error.
        """
        name, arguments, attributes = data.get("error"), data.get("arguments"), data.get("attributes")
        if not (isinstance(name, str) and isinstance(arguments, list | tuple) and isinstance(attributes, Mapping)):
            raise ProtocolError(f"this describes no error: {data!r}")
        kind = next((known for known in _known_errors() if _name(known) == name), None)
        if kind is None:
            return RemoteError("a remote actor", name, ", ".join(map(str, arguments)))
        # The constructor is skipped: its signature differs between classes, and ``args`` were recorded after it ran.
        error = kind.__new__(kind)
        error.args = tuple(_frozen(argument) for argument in arguments)
        # Names with two leading underscores are dropped, so that a peer cannot replace attributes like ``__class__``.
        plain = {str(key): _frozen(value) for key, value in attributes.items() if not str(key).startswith("__")}
        error.__dict__.update(plain)
        return error

    def _structure(self, data: Any, kind: Any, what: str) -> Any:
        try:
            return self._converter.structure(data, kind)
        except BaseValidationError as group:
            stopped = next((leaf for leaf in leaves(group) if isinstance(leaf, ActorStopped)), None)
            if stopped is not None:
                raise stopped from None
            details = "; ".join(cattrs.transform_error(group))
            raise ProtocolError(f"{what} does not fit its class: {details}") from None
        except (TypeError, ValueError, KeyError, AttributeError, cattrs.StructureHandlerNotFoundError) as error:
            raise ProtocolError(f"{what} does not fit its class: {error!r}") from None

    def _kind(self, protocol: object, message: object) -> type[AnyMessage[Any]]:
        known = self._protocols.get(protocol) if isinstance(protocol, str) else None
        if known is None:
            raise ProtocolError(f"no protocol {protocol!r} passes here; known are {self._known()}")
        for kind in messages_of(known):
            if kind.__name__ == message:
                return kind
        names = ", ".join(kind.__name__ for kind in messages_of(known))
        raise ProtocolError(f"protocol {protocol!r} has no message {message!r}; it has {names}")

    def _known(self) -> str:
        return ", ".join(self._protocols) or "none"


def _is_ref(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Ref)


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return isinstance(value, _PLAIN)


def _frozen(value: Any) -> Any:
    """Convert lists to tuples: codecs without tuples deliver lists, but errors hold tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known_errors(root: type[ArealError] = ArealError) -> Iterator[type[ArealError]]:
    """Iterate over the classes that an error from a wire may become: errors raised on purpose, and remote errors."""
    if root is RemoteError or not issubclass(root, ActorError):
        yield root
    for kind in root.__subclasses__():
        yield from _known_errors(kind)
