"""The handshake: identity of both sides, version of the wire format, and mutual proof that they know the secret.

::

    connecting ── hello: versions, node, incarnation, nonce ──────────▶ listening
               ◀─ hello: the same, and HMAC(secret, "listener" + both hellos)
               ── HMAC(secret, "connector" + both hellos) ────────────▶
               ◀─ welcome, or why not

Before the proof, nothing else from the other side is interpreted, and at most a few KiB of it are read. The proof
covers both hellos, so that neither versions nor names can be changed on the way, and the role at its beginning prevents
a proof from being reflected to its sender. The secret itself is never sent. The rest of the connection is authenticated
by the handshake, but not encrypted: use TCP only in a trusted network or in a tunnel.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Any

import anyio
import cattrs
import msgspec
from anyio.abc import ByteStream
from attrs import asdict, frozen

from areal_actors import __version__
from areal_actors.errors import ConfigError, ProtocolError, Unreachable
from areal_actors.kernel.remote.frames import DEFAULT_MESSAGE_BYTES, Limits

_MAGIC = b"areal-actors\n"
_PREFIX = struct.Struct("<13sI")
_MAX_BYTES = 64 * 1024
_VERSION = 3
"""The version of the wire format. All processes of a run have the same version of this package."""

_MIN_SECRET_BYTES = 16


@frozen(kw_only=True)
class Hello:
    """The introduction of one side.

    ``incarnation`` distinguishes successive processes of one node: the highest is current.
    """

    node: str
    incarnation: int
    nonce: str
    wire: int
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    package: str = __version__


def check_secret(secret: bytes) -> None:
    """Refuse a secret that could be guessed.

    Raises:
        ConfigError: it is shorter than 16 bytes.
    """
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"the secret of a connection has {len(secret)} bytes; give at least {_MIN_SECRET_BYTES}, as "
            "secrets.token_bytes(32) does, and share them in a file that only its owner can read"
        )


def greet(*, node: str, incarnation: int, limits: Limits) -> Hello:
    """Return the hello of this side, with a fresh nonce."""
    return Hello(
        node=node,
        incarnation=incarnation,
        nonce=secrets.token_hex(32),
        wire=_VERSION,
        max_message_bytes=limits.max_message_bytes,
    )


async def send_hello(stream: ByteStream, own: Hello, secret: bytes) -> tuple[Hello, Any]:
    """Perform the handshake of the connecting side. Return the other side's hello and its welcome.

    Raises:
        Unreachable: the other side hung up, does not know the secret, speaks another version, or refuses the
            connection.
    """
    sent = await send_packet(stream, asdict(own))
    answer, received = await read_packet(stream)
    other = _hello(answer.get("hello")) if "hello" in answer else None
    if other is None:
        raise Unreachable(f"the other side refuses the connection: {answer.get('refused')}", sent=False)
    _check_version(own, other)
    transcript = sent + received
    proof = await _read(stream)
    if "proof" not in proof:
        raise Unreachable(f"the other side refuses the connection: {proof.get('refused')}", sent=False)
    if not hmac.compare_digest(str(proof["proof"]).encode(), _proof(secret, b"listener", transcript).encode()):
        raise Unreachable(f"node {other.node!r} does not know the secret of this connection", sent=False)
    await send_packet(stream, {"proof": _proof(secret, b"connector", transcript)})
    welcome = await _read(stream)
    if "welcome" not in welcome:
        raise Unreachable(f"the other side refuses the connection: {welcome.get('refused')}", sent=False)
    return other, welcome["welcome"]


async def receive_hello(stream: ByteStream, own: Hello, secret: bytes) -> Hello:
    """Perform the handshake of the listening side up to the proof. The caller then sends a welcome or a refusal.

    Raises:
        ProtocolError: the other side sent no valid hello or proof; the message says why.
    """
    words, received = await read_packet(stream)
    other = _hello(words)
    try:
        _check_version(own, other)
    except Unreachable as error:
        # So that the other side can report the mismatch, too.
        await send_packet(stream, {"hello": asdict(own)})
        raise ProtocolError(str(error)) from None
    sent = await send_packet(stream, {"hello": asdict(own)})
    transcript = received + sent
    await send_packet(stream, {"proof": _proof(secret, b"listener", transcript)})
    proof = await _read(stream)
    # Compared in constant time, so that the duration reveals nothing about the expected proof.
    if not hmac.compare_digest(str(proof.get("proof")).encode(), _proof(secret, b"connector", transcript).encode()):
        raise ProtocolError("the proof of the secret is wrong")
    return other


async def send_packet(stream: ByteStream, words: dict[str, Any]) -> bytes:
    """Send one packet of the handshake and return its bytes."""
    body = msgspec.msgpack.encode(words)
    packet = _PREFIX.pack(_MAGIC, len(body)) + body
    await stream.send(packet)
    return packet


async def read_packet(stream: ByteStream) -> tuple[dict[str, Any], bytes]:
    """Read one packet of the handshake; return its content and its bytes.

    Raises:
        ProtocolError: the bytes are not a packet, or it is too large.
    """
    prefix = await _read_exactly(stream, _PREFIX.size)
    magic, length = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ProtocolError(f"the peer sent {prefix!r}, which is not a hello of areal_actors")
    # Checked before the body is read, because the other side is not authenticated yet.
    if length > _MAX_BYTES:
        raise ProtocolError(f"a hello of {length} bytes is too large")
    body = await _read_exactly(stream, length)
    try:
        words = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a hello cannot be read: {error}") from None
    if not isinstance(words, dict):
        raise ProtocolError("a hello holds no words")
    return words, prefix + body


async def _read(stream: ByteStream) -> dict[str, Any]:
    words, _ = await read_packet(stream)
    return words


async def _read_exactly(stream: ByteStream, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        try:
            data += await stream.receive(num_bytes - len(data))
        except anyio.EndOfStream:
            raise ProtocolError("the other side hung up during the introduction") from None
    return data


def _hello(words: object) -> Hello:
    try:
        return cattrs.structure(words, Hello)
    except (cattrs.BaseValidationError, TypeError, ValueError, AttributeError):
        raise ProtocolError("the peer sent something other than a hello") from None


def _check_version(own: Hello, other: Hello) -> None:
    if own.wire != other.wire:
        raise Unreachable(
            f"this side (areal_actors {own.package}) speaks version {own.wire} of the wire, node {other.node!r} "
            f"(areal_actors {other.package}) version {other.wire}; install the same version on both",
            sent=False,
        )


def _proof(secret: bytes, role: bytes, transcript: bytes) -> str:
    return hmac.new(secret, role + b"\0" + transcript, "sha256").hexdigest()
