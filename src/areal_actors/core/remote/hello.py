"""The introduction: who speaks, which version of the wire, and proof on both sides that they know the secret.

::

    connecting ── hello: versions, node, incarnation, nonce ──────────▶ listening
               ◀─ hello: the same, and HMAC(secret, "listener" + both hellos)
               ── HMAC(secret, "connector" + both hellos) ────────────▶
               ◀─ welcome, or why not

Nothing that a stranger sends is looked at closer than this, and no more than a few KiB of it is read. The proof covers
both hellos, so that neither versions nor names can be changed on the way, and the words before it keep a proof from
being sent back as the other one. The secret itself never travels. What follows is authenticated by its connection, not
encrypted: TCP belongs in a network that is trusted, or in a tunnel.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import anyio
import cattrs
import msgspec
from anyio.abc import ByteStream
from attrs import asdict, frozen

from areal_actors.core.remote.limits import DEFAULT_MESSAGE_BYTES, Limits
from areal_actors.errors import ConfigError, ProtocolError, Unreachable

__all__ = ["Hello", "check_secret", "greet", "read_packet", "receive_hello", "send_hello", "send_packet"]

_MAGIC = b"areal-actors\n"
_PREFIX = struct.Struct("<13sI")
_MAX_BYTES = 64 * 1024
_VERSIONS = (1, 1)
"""Oldest and newest version of the wire that this package speaks."""

_MIN_SECRET_BYTES = 16


@frozen(kw_only=True)
class Hello:
    """How a side introduces itself. ``incarnation`` tells the lives of one node apart: the higher one is the living."""

    node: str
    incarnation: int
    nonce: str
    window_messages: int
    window_bytes: int
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    oldest: int = _VERSIONS[0]
    newest: int = _VERSIONS[1]
    package: str = ""


def check_secret(secret: bytes) -> None:
    """Refuse what can be guessed.

    Raises:
        ConfigError: it is shorter than 16 bytes.
    """
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"the secret of a connection has {len(secret)} bytes; give at least {_MIN_SECRET_BYTES}, as "
            "secrets.token_bytes(32) does, and share them in a file that only its owner can read"
        )


def greet(*, node: str, incarnation: int, limits: Limits) -> Hello:
    """The hello of this side, with a fresh nonce."""
    return Hello(
        node=node,
        incarnation=incarnation,
        nonce=secrets.token_hex(32),
        window_messages=limits.window_messages,
        window_bytes=limits.window_bytes,
        max_message_bytes=limits.max_message_bytes,
        package=_package_version(),
    )


async def send_hello(stream: ByteStream, own: Hello, secret: bytes) -> tuple[Hello, Any]:
    """Introduce the connecting side; returns the other side's hello and its welcome.

    Raises:
        Unreachable: the other side hung up, or does not know the secret, or speaks another version, or refuses us.
    """
    sent = await send_packet(stream, asdict(own))
    answer, received = await read_packet(stream)
    other = _hello(answer.get("hello")) if "hello" in answer else None
    if other is None:
        raise Unreachable(f"the other side refuses the connection: {answer.get('refused')}", sent=False)
    _check_version(own, other)
    transcript = sent + received
    _check_proof(answer, await _read(stream), _proof(secret, b"listener", transcript))
    await send_packet(stream, {"proof": _proof(secret, b"connector", transcript)})
    welcome = await _read(stream)
    if "welcome" not in welcome:
        raise Unreachable(f"the other side refuses the connection: {welcome.get('refused')}", sent=False)
    return other, welcome["welcome"]


async def receive_hello(stream: ByteStream, own: Hello, secret: bytes) -> Hello:
    """Receive whoever connects, up to their proof; the caller welcomes or refuses them.

    Raises:
        ProtocolError: they are no honest side of ours; says why.
    """
    words, received = await read_packet(stream)
    other = _hello(words)
    try:
        _check_version(own, other)
    except Unreachable as error:
        await send_packet(stream, {"hello": asdict(own)})  # from which they find out the same
        raise ProtocolError(str(error)) from None
    sent = await send_packet(stream, {"hello": asdict(own)})
    transcript = received + sent
    await send_packet(stream, {"proof": _proof(secret, b"listener", transcript)})
    proof = await _read(stream)
    if not hmac.compare_digest(str(proof.get("proof")).encode(), _proof(secret, b"connector", transcript).encode()):
        raise ProtocolError("the proof of the secret is wrong")
    return other


async def send_packet(stream: ByteStream, words: dict[str, Any]) -> bytes:
    """Send one packet of the introduction; returns its bytes."""
    body = msgspec.msgpack.encode(words)
    packet = _PREFIX.pack(_MAGIC, len(body)) + body
    await stream.send(packet)
    return packet


async def read_packet(stream: ByteStream) -> tuple[dict[str, Any], bytes]:
    """Read one packet; its words and its bytes.

    Raises:
        ProtocolError: these bytes are no packet, or it is too large.
    """
    prefix = await _read_exactly(stream, _PREFIX.size)
    magic, length = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ProtocolError(f"what came is no hello of areal_actors but {prefix!r}")
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


def _hello(words: Any) -> Hello:
    try:
        return cattrs.structure(words, Hello)
    except (cattrs.BaseValidationError, TypeError, ValueError, AttributeError):
        raise ProtocolError("what came is no hello") from None


def _check_version(own: Hello, other: Hello) -> None:
    if own.newest < other.oldest or other.newest < own.oldest:
        raise Unreachable(
            f"this side (areal_actors {own.package}) speaks versions {own.oldest} to {own.newest} of the wire, "
            f"node {other.node!r} (areal_actors {other.package}) {other.oldest} to {other.newest}; "
            "install matching versions",
            sent=False,
        )


def _check_proof(answer: dict[str, Any], words: dict[str, Any], expected: str) -> None:
    if "proof" not in words:
        raise Unreachable(f"the other side refuses the connection: {words.get('refused')}", sent=False)
    if not hmac.compare_digest(str(words["proof"]).encode(), expected.encode()):
        node = answer["hello"].get("node")
        raise Unreachable(f"node {node!r} does not know the secret of this connection", sent=False)


def _proof(secret: bytes, role: bytes, transcript: bytes) -> str:
    return hmac.new(secret, role + b"\0" + transcript, "sha256").hexdigest()


def _package_version() -> str:
    try:
        return version("areal_actors")
    except PackageNotFoundError:
        return "unknown"
