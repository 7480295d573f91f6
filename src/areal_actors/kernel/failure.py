"""Conversion of exceptions at the boundary of an actor, and root causes of exception groups.

An error that a handler raises during an **ask** or a **stream** is converted by these rules:

* an ``ArealError`` that is not an ``ActorError`` was raised on purpose and is part of the answer: the asker gets a new
  instance of the same class with the same arguments and attributes (a ``NotFound`` keeps its status and its param);
* a ``RemoteError`` passes on unchanged, so that it keeps naming the actor where it began;
* everything else, including other ``ActorError`` (they describe a different ask), becomes a ``RemoteError``: text.

No exception object, and thus no traceback with its frames, is ever shared between two tasks. For a
connection, errors become plain data: ``None``, booleans, numbers, strings, bytes, and containers of them. A peer cannot
choose which classes are constructed.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from areal_actors.errors import ActorError, ActorStopped, ArealError, ProtocolError, RemoteError
from areal_actors.lib.loops import is_trio
from areal_actors.lib.task_groups import leaves

_PLAIN = (type(None), bool, int, float, str, bytes)


def root_cause(error: BaseException) -> BaseException:
    """Return the one exception that a person should read first.

    Inside a group, original errors come before ``ActorStopped`` and cancellations, which follow from them. Among equals
    the first one wins.
    """
    return min(leaves(error), key=_rank)


def transferred(error: BaseException, actor: str) -> ArealError:
    """Return a new error for the asker, converted from the ``error`` that a handler of ``actor`` raised."""
    cause = root_cause(error)
    if isinstance(cause, RemoteError) or (isinstance(cause, ArealError) and not isinstance(cause, ActorError)):
        # Without the constructor, whose signature differs between classes.
        copy = type(cause).__new__(type(cause))
        copy.args = cause.args
        copy.__dict__.update({name: value for name, value in vars(cause).items() if name != "__notes__"})
        for note in getattr(cause, "__notes__", ()):
            copy.add_note(note)
        return copy
    text = "".join(traceback.format_exception(error))
    return RemoteError(actor, type(cause).__name__, str(cause), text)


def error_to_data(error: BaseException, actor: str) -> dict[str, Any]:
    """Return an error of a handler of ``actor`` as plain data, converted by the rules above.

    Attributes that are not plain data are omitted; such arguments are converted to text.
    """
    sent = transferred(error, actor)
    attributes = {name: value for name, value in vars(sent).items() if name != "__notes__" and _is_plain(value)}
    arguments = [value if _is_plain(value) else str(value) for value in sent.args]
    return {"error": _name(type(sent)), "arguments": arguments, "attributes": attributes}


def error_from_data(data: object) -> ArealError:
    """Return the error that ``data`` from ``error_to_data`` describes.

    It is a ``RemoteError`` if its class is unknown here.

    Raises:
        ProtocolError: the data does not describe an error.
    """
    if not isinstance(data, Mapping):
        raise ProtocolError(f"this describes no error: {data!r}")
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


def is_stray_cancellation(error: BaseException) -> bool:
    """Return whether ``error`` is a ``CancelledError`` in a task that was not cancelled.

    On asyncio, awaiting a future that other code cancelled raises it; on trio it is an exception like any other. It is
    an ordinary failure of the handler and must not be mistaken for the cancellation of the actor.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    if is_trio():
        return True
    task = asyncio.current_task()
    return task is not None and task.cancelling() == 0


def _rank(error: BaseException) -> int:
    if isinstance(error, ActorStopped):
        return 1
    return 0 if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)) else 2


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return isinstance(value, _PLAIN)


def _frozen(value: object) -> Any:
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
