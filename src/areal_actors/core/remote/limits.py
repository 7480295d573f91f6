"""What one side of a connection grants to the other: sizes, windows, patience. The defaults suit one cluster."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

__all__ = ["CHUNK_BYTES", "DEFAULT_MESSAGE_BYTES", "Limits"]

CHUNK_BYTES = 256 * 1024
"""Largest payload of one frame. Larger messages travel in chunks of this size, and control frames pass between them."""

DEFAULT_MESSAGE_BYTES = 1 << 30

_POSITIVE: Any = validators.gt(0)


@frozen(kw_only=True)
class Limits:
    """Bounds that a connection keeps, whatever the other side sends."""

    max_message_bytes: int = field(default=DEFAULT_MESSAGE_BYTES, validator=_POSITIVE)
    """A message larger than this is refused by the side that would send it; one that comes nevertheless closes the
    connection, before memory is set aside for it."""

    window_messages: int = field(default=256, validator=_POSITIVE)
    """Messages per actor that may be under way to its mailbox: the other side waits for credit beyond them."""

    window_bytes: int = field(default=64 << 20, validator=_POSITIVE)
    """Bytes per actor that may be under way to its mailbox; the message that crosses this line is the last one."""

    max_pending_bytes: int = field(default=64 << 20, validator=_POSITIVE)
    """While more than this waits to be written, no new credit is given: who does not read gets nothing to do."""

    heartbeat_seconds: float = field(default=5.0, validator=_POSITIVE)
    """A sign of life is sent this often; infinity sends none."""

    silence_seconds: float = field(default=15.0, validator=_POSITIVE)
    """After this long without one byte from the other side, it counts as unreachable."""

    hello_seconds: float = field(default=10.0, validator=_POSITIVE)
    """How long the introduction may take."""

    cleanup_seconds: float = field(default=10.0, validator=_POSITIVE)
    """How long leaving waits: for the handler of a stream to end, and for the last messages to be written."""

    redial_seconds: float = field(default=0.1, validator=_POSITIVE)
    """How long a standing line waits before it connects again; twice as long after each attempt that failed."""

    max_redial_seconds: float = field(default=5.0, validator=_POSITIVE)
    """How long it waits at most."""
