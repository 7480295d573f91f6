"""Encoding of messages: msgpack for structured data, and raw memory for arrays, tensors and long bytes.

Both sides know the type of every value from the classes of this program: the type of a message from the handler table
of its actor, the type of a reply from the message. Nothing is imported and no object is constructed by a name that a
peer sends. Pickle is not used; a value that cannot be encoded is refused, with an error that names it, before anything
is sent.

Integers of more than 64 bits and text with half of a surrogate pair, which Python's JSON parser accepts, are
extensions: msgpack has no form for them. A message is searched for them only if msgpack has refused it.

Arrays above 8 KiB are sent as separate buffers, which are neither copied into the msgpack data nor copied after
arrival. The same holds for tensors if torch is loaded already; this module never loads it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, cast, get_args, get_origin

import cattrs
import msgspec
import numpy as np

from areal_actors.errors import EncodingError, ProtocolError
from areal_actors.kernel.ref import Ref
from areal_actors.kernel.remote.frames import Buffer

_INLINE_BYTES = 8 * 1024
"""Smaller arrays are copied into the msgpack data: a separate buffer costs more than the copy."""

_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
_PLAIN = (bool, int, float, str)
_SURROGATE = re.compile("[\ud800-\udfff]")
_DTYPE = re.compile(r"[<>|=]?[biufc][1-9]\d?")
_UNSENDABLE = (
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    RuntimeError,  # also torch's, and a recursion that is too deep
    OverflowError,
    cattrs.BaseValidationError,
    cattrs.StructureHandlerNotFoundError,
)


class _Code(IntEnum):
    """The type of a msgpack extension."""

    ARRAY = 1
    TENSOR = 2
    BYTES = 3
    TUPLE = 4
    INTEGER = 5
    TEXT = 6


class _Long:
    """Bytes that are sent as a separate buffer."""

    __slots__ = ("value",)

    def __init__(self, value: bytes) -> None:
        self.value = value


class _Tuple:
    """A tuple in a position where no declared type says so."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class _Marked:
    """The extension that an integer or a text is sent as; msgspec's own class cannot be a key of a mapping."""

    __slots__ = ("code", "data")

    def __init__(self, code: _Code, data: bytes) -> None:
        self.code = code
        self.data = data


class Codec:
    """Encoder and decoder of one connection; used by one task at a time."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._extend)
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._restore)
        self._buffers: list[Buffer] = []
        self._parts: Sequence[Buffer] = ()
        self._converter = _create_converter()
        # Hooks by type: looking up cattrs' hook for every message costs as much as using it.
        self._writers: dict[Any, Callable[[Any], Any]] = {}
        self._readers: dict[Any, Callable[[Any, Any], Any]] = {}

    def encode(self, words: Sequence[object], what: str = "an answer") -> list[Buffer]:
        """Return ``words`` (plain data, arrays, tensors) as one part of msgpack, followed by the buffers.

        Raises:
            EncodingError: a value in it cannot be encoded.
        """
        self._buffers = []
        try:
            try:
                return [self._encoder.encode(words), *self._buffers]
            except (OverflowError, UnicodeEncodeError):
                self._buffers = []
                return [self._encoder.encode(_marked(words)), *self._buffers]
        except (ProtocolError, *_UNSENDABLE) as error:
            raise EncodingError(f"{what} cannot be sent: {error}") from None
        finally:
            self._buffers = []

    def decode(self, parts: Sequence[Buffer]) -> list[Any]:
        """Return the words that ``encode`` was given.

        Raises:
            ProtocolError: the parts are malformed.
        """
        self._parts = parts
        try:
            words = self._decoder.decode(parts[0])
        except (*_UNSENDABLE, IndexError, msgspec.MsgspecError) as error:
            raise ProtocolError(f"a message cannot be read: {error}") from None
        finally:
            self._parts = ()
        if not isinstance(words, list):
            raise ProtocolError(f"a message is a list of words, not a {type(words).__name__}")
        return words

    def to_data(self, value: object, kind: Any, what: str) -> Any:
        """Return ``value``, of the declared type ``kind``, as plain data for ``encode``.

        Raises:
            EncodingError: it contains a value that cannot be sent; the message says which.
        """
        try:
            write = self._writers.get(kind)
            if write is None:
                write = self._writers[kind] = self._converter.get_unstructure_hook(kind)
            return write(value)
        except ProtocolError as error:
            raise EncodingError(f"{what} cannot be sent: {error}") from None
        except _UNSENDABLE as error:
            raise EncodingError(f"{what} cannot be sent: {error!r}") from None

    def from_data(self, data: object, kind: Any, what: str) -> Any:
        """Return the value of type ``kind`` that ``to_data`` was given.

        Raises:
            ProtocolError: the data does not fit ``kind``.
        """
        try:
            read = self._readers.get(kind)
            if read is None:
                read = self._readers[kind] = self._converter.get_structure_hook(kind)
            return read(data, kind)
        except cattrs.BaseValidationError as group:
            raise ProtocolError(f"{what} does not fit its class: {'; '.join(cattrs.transform_error(group))}") from None
        except (ProtocolError, *_UNSENDABLE) as error:
            raise ProtocolError(f"{what} does not fit its class: {error}") from None

    def to_bytes(self, data: object) -> bytes:
        """Return plain data of ``to_data`` in one piece, for a file. Raises ``EncodingError`` as ``encode`` does."""
        return msgspec.msgpack.encode([bytes(part) for part in self.encode([data], "it")])

    def from_bytes(self, content: bytes) -> Any:
        """Return the data that ``to_bytes`` was given. Raises ``ProtocolError`` if ``content`` is malformed."""
        try:
            parts = msgspec.msgpack.decode(content, type=list[bytes])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a record cannot be read: {error}") from None
        (data,) = self.decode(parts)
        return data

    # ------------------------------------------------------------------------------------------------ msgpack

    def _extend(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if not _DTYPE.fullmatch(value.dtype.str):
                raise ProtocolError(f"an array of dtype {value.dtype} has no form on a wire; send numbers")
            # A contiguous array is not copied here: ``reshape`` and ``view`` share its memory.
            flat = np.ascontiguousarray(value).reshape(-1)
            data: Buffer = flat.view(np.uint8).data if value.size else b""
            return self._extension(_Code.ARRAY, [value.dtype.str, value.shape], data)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _Long):
            return self._extension(_Code.BYTES, [], value.value)
        if isinstance(value, _Tuple):
            return msgspec.msgpack.Ext(int(_Code.TUPLE), self._encoder.encode(value.items))
        if isinstance(value, _Marked):
            return msgspec.msgpack.Ext(int(value.code), value.data)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._extension(_Code.TENSOR, *_tensor_parts(torch, value))
        raise ProtocolError(f"a {type(value).__qualname__} has no form on a wire")

    def _extension(self, code: _Code, words: list[Any], raw: Buffer) -> msgspec.msgpack.Ext:
        if len(raw) <= _INLINE_BYTES:
            words.append(bytes(raw))
        else:
            self._buffers.append(raw)
            # Part 0 is the msgpack data, so the first buffer is part 1.
            words.append(len(self._buffers))
        return msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(words))

    def _restore(self, code: int, data: memoryview) -> Any:
        if code == _Code.TUPLE:
            return tuple(self._decoder.decode(data))
        if code == _Code.INTEGER:
            return int.from_bytes(data, "little", signed=True)
        if code == _Code.TEXT:
            return str(data, "utf-8", "surrogatepass")
        words = msgspec.msgpack.decode(data)
        where = words.pop()
        # ``bytearray``, so that the array is writable.
        if isinstance(where, bytes):
            raw: Buffer = bytearray(where)
        elif isinstance(where, int) and where >= 1:
            raw = self._parts[where]
        else:
            raise ProtocolError(f"{where!r} names no buffer")
        if code == _Code.BYTES:
            return bytes(raw)
        dtype, shape = words
        if code == _Code.ARRAY:
            if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
                raise ProtocolError(f"{dtype!r} is not a dtype of numbers")
            return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
        if code == _Code.TENSOR:
            return _tensor(dtype, shape, raw)
        raise ProtocolError(f"extension {code} is unknown")


# ---------------------------------------------------------------------------------------------------- arrays


def _tensor_parts(torch: Any, value: Any) -> tuple[list[Any], Buffer]:
    """Return the dtype and shape of a tensor, and its memory. Raises ``ProtocolError``."""
    dtype = str(value.dtype).removeprefix("torch.")
    if value.is_quantized or value.layout != torch.strided:
        raise ProtocolError(f"a tensor of {value.dtype}, {value.layout} has no form on a wire")
    if value.device.type != "cpu":
        raise ProtocolError(f"a tensor on {value.device} does not travel; move it with .cpu() first")
    raw: Buffer = b""
    if value.numel():
        flat = value.detach().contiguous().reshape(-1)
        # numpy has no bfloat16, so the bytes are viewed before they are given to it.
        raw = cast("memoryview", flat.view(torch.uint8).numpy().data)
    return [dtype, tuple(value.shape)], raw


def _tensor(dtype: Any, shape: Any, raw: Buffer) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ProtocolError("a tensor arrived, but torch is not loaded in this process; import it before listening")
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(kind, torch.dtype):
        raise ProtocolError(f"{dtype!r} is not a dtype that this torch knows")
    if not len(raw):
        if 0 not in shape:
            raise ProtocolError(f"a tensor of shape {shape} has no bytes")
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)


# ------------------------------------------------------------------------------------------------ structuring


def _create_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    converter.register_unstructure_hook_func(_is_ref, lambda ref: _refuse_ref(ref.address))
    converter.register_structure_hook_func(_is_ref, lambda data, _: _refuse_ref(data))
    # cattrs would coerce ``bytes``; the hooks check the type instead and mark long values for a separate buffer.
    converter.register_unstructure_hook(bytes, lambda value: _Long(value) if len(value) > _INLINE_BYTES else value)
    converter.register_structure_hook(bytes, lambda data, _: _instance(data, bytes))
    converter.register_unstructure_hook_func(_is_array, lambda value: value)
    converter.register_structure_hook_func(_is_array, lambda data, _: _instance(data, np.ndarray))
    converter.register_structure_hook_func(
        lambda kind: kind in (None, NoneType), lambda data, _: _instance(data, NoneType)
    )
    converter.register_unstructure_hook_func(_is_any, _any_to_data)
    converter.register_structure_hook_func(_is_any, lambda data, _: data)
    converter.register_unstructure_hook_factory(_is_choice, lambda kind: _Choice(converter, kind).to_data)
    converter.register_structure_hook_factory(_is_choice, lambda kind: _Choice(converter, kind).from_data)
    return converter


class _Choice:
    """Converter for a union: plain values unchanged, other values tagged with the name of their class in the union."""

    def __init__(self, converter: cattrs.Converter, kind: Any) -> None:
        self._converter = converter
        self._plain = tuple(member for member in get_args(kind) if member in (*_PLAIN, NoneType))
        self._members = {member.__name__: member for member in get_args(kind) if member not in self._plain}
        self._kind = kind

    def to_data(self, value: object) -> Any:
        member = self._members.get(type(value).__name__)
        if member is not None:
            return [type(value).__name__, self._converter.unstructure(value, member)]
        if isinstance(value, np.generic):
            value = value.item()
        return self._checked(value)

    def from_data(self, data: object, _: object) -> Any:
        if not isinstance(data, list):
            return self._checked(data)
        name, inner = data
        if name not in self._members:
            raise ProtocolError(f"{name!r} is none of {self._kind}")
        return self._converter.structure(inner, self._members[name])

    def _checked(self, value: object) -> Any:
        if isinstance(value, self._plain) or (isinstance(value, int) and float in self._plain):
            return value
        raise ProtocolError(f"a {type(value).__qualname__} is none of {self._kind}")


def _any_to_data(value: Any) -> Any:
    """Convert a value of a field of type ``Any``: JSON data, tuples, arrays and tensors."""
    kind = type(value)
    if kind is list:
        return [_any_to_data(inner) for inner in value]
    if kind is tuple:
        return _Tuple([_any_to_data(inner) for inner in value])
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise ProtocolError(f"{key!r} is not a key of a mapping on a wire; use strings")
        return {key: _any_to_data(inner) for key, inner in value.items()}
    if kind is bytes and len(value) > _INLINE_BYTES:
        return _Long(value)
    if value is None or kind in (*_PLAIN, bytes) or isinstance(value, (np.ndarray, np.generic)):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value
    # Other classes are refused, because the receiver could not restore them.
    raise ProtocolError(
        f"a {kind.__qualname__} in a field of type Any has no form on a wire; send data of JSON, or arrays"
    )


def _marked(value: object) -> Any:
    """Return plain data in which the integers and texts that msgpack has no form for are marked."""
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        # One bit more than the magnitude, for the sign.
        return _Marked(_Code.INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, str) and _SURROGATE.search(value):
        return _Marked(_Code.TEXT, value.encode("utf-8", "surrogatepass"))
    if isinstance(value, list | tuple):
        return type(value)(map(_marked, value))
    if isinstance(value, dict):
        return {_marked(key): _marked(inner) for key, inner in value.items()}
    return _Tuple(_marked(value.items)) if isinstance(value, _Tuple) else value


def _instance(value: object, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ProtocolError(f"a {type(value).__qualname__} is no {kind.__qualname__}")
    return value


def _refuse_ref(what: object) -> NoReturn:
    raise ProtocolError(f"refs do not travel inside messages ({what}); expose the actor on the connection instead")


def _is_ref(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Ref)


def _is_array(kind: Any) -> bool:
    return (get_origin(kind) or kind) is np.ndarray


def _is_any(kind: Any) -> bool:
    """Return whether ``kind`` is ``Any`` or a mapping to ``Any``, which cattrs would pass through unchecked."""
    return kind is Any or (get_origin(kind) in (Mapping, dict) and get_args(kind)[1] is Any)


def _is_choice(kind: Any) -> bool:
    """Return whether ``kind`` is a union of several types other than ``None``. cattrs handles ``X | None`` well."""
    return get_origin(kind) in (Union, UnionType) and len([m for m in get_args(kind) if m is not NoneType]) > 1
