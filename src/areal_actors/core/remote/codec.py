"""Messages as words and buffers: msgpack for what has structure, raw memory for arrays, tensors and long bytes.

The shape of everything is known on both sides from the classes of this program: a message by the table of the actor
that it is sent to, a reply by the message. Nothing is imported, and no object built, by a name that a peer sends. There
is no pickle; what cannot be written down is refused, by name, before anything is sent.

Arrays above a few KiB leave the words and travel as buffers of their own, which are not copied into the words
nor once they have arrived. Tensors do so where torch is loaded already; this module never loads it.
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
import numpy.typing as npt

from areal_actors.core.message import Address
from areal_actors.core.ref import Ref
from areal_actors.core.remote.frames import Buffer
from areal_actors.core.wire import Wire
from areal_actors.errors import ArealError, ProtocolError

__all__ = ["Codec"]

_INLINE_BYTES = 8 * 1024
"""Below this an array stays among the words: a buffer of its own costs more than the copy."""

_PLAIN = (bool, int, float, str)
_DTYPE = re.compile(r"[<>|=]?[biufc][1-9]\d?")
_TENSOR_DTYPES = frozenset(  # what ``str(tensor.dtype)`` may say after "torch."
    {
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    }
)
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
    """What an extension of msgpack holds."""

    ARRAY = 1
    TENSOR = 2
    BYTES = 3
    TUPLE = 4


class _Long:
    """Bytes that travel as a buffer."""

    __slots__ = ("value",)

    def __init__(self, value: bytes) -> None:
        self.value = value


class _Tuple:
    """A tuple where no type says so."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Codec:
    """Translates in both directions; used by one task at a time."""

    def __init__(self) -> None:
        self._errors = Wire(resolve=_refuse_ref)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._extend)
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._restore)
        self._buffers: list[Buffer] = []
        self._parts: Sequence[Buffer] = ()
        self._converter = _create_converter()
        # By the kinds that have come up: finding the way to write one anew each time costs as much as writing it.
        self._writers: dict[Any, Callable[[Any], Any]] = {}
        self._readers: dict[Any, Callable[[Any, Any], Any]] = {}

    def encode(self, words: list[Any], what: str = "an answer") -> list[Buffer]:
        """``words`` (plain data, arrays, tensors) as one part of msgpack, followed by the buffers.

        Raises:
            ProtocolError: something in it cannot be written down.
        """
        self._buffers = []
        try:
            return [self._encoder.encode(words), *self._buffers]
        except (ProtocolError, *_UNSENDABLE) as error:
            raise ProtocolError(f"{what} cannot be sent: {error}") from None
        finally:
            self._buffers = []

    def decode(self, parts: Sequence[Buffer]) -> list[Any]:
        """What ``encode`` was given.

        Raises:
            ProtocolError: these parts are no such thing.
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

    def to_data(self, value: Any, kind: Any, what: str) -> Any:
        """``value``, which is declared as ``kind``, as words.

        Raises:
            ProtocolError: it holds something that cannot travel; says what.
        """
        try:
            write = self._writers.get(kind)
            if write is None:
                write = self._writers[kind] = self._converter.get_unstructure_hook(kind)
            return write(value)
        except ProtocolError as error:
            raise ProtocolError(f"{what} cannot be sent: {error}") from None
        except _UNSENDABLE as error:
            raise ProtocolError(f"{what} cannot be sent: {error!r}") from None

    def from_data(self, data: Any, kind: Any, what: str) -> Any:
        """What ``to_data`` was given.

        Raises:
            ProtocolError: the words do not fit ``kind``.
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

    def error_to_data(self, error: BaseException, actor: str) -> dict[str, Any]:
        """An error of ``actor``'s handler, as ``Wire`` writes it."""
        return self._errors.error_to_data(error, actor)

    def error_from_data(self, data: Any) -> ArealError:
        """What ``error_to_data`` was given."""
        if not isinstance(data, dict):
            raise ProtocolError(f"this describes no error: {data!r}")
        return self._errors.error_from_data(data)

    # ------------------------------------------------------------------------------------------------ msgpack

    def _extend(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._extension(_Code.ARRAY, [value.dtype.str, value.shape], _bytes_of_array(value))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _Long):
            return self._extension(_Code.BYTES, [], value.value)
        if isinstance(value, _Tuple):
            return msgspec.msgpack.Ext(int(_Code.TUPLE), self._encoder.encode(value.items))
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._extension(
                _Code.TENSOR, [_tensor_dtype(value), tuple(value.shape)], _bytes_of_tensor(value, torch)
            )
        raise ProtocolError(f"a {type(value).__qualname__} has no form on a wire")

    def _extension(self, code: _Code, words: list[Any], raw: Buffer) -> msgspec.msgpack.Ext:
        if len(raw) <= _INLINE_BYTES:
            words.append(bytes(raw))
        else:
            self._buffers.append(raw)
            words.append(len(self._buffers))
        return msgspec.msgpack.Ext(int(code), msgspec.msgpack.encode(words))

    def _restore(self, code: int, data: memoryview) -> Any:
        if code == _Code.TUPLE:
            return tuple(self._decoder.decode(data))
        words = msgspec.msgpack.decode(data)
        where = words.pop()
        raw = bytearray(where) if isinstance(where, bytes) else self._parts[_position(where)]
        if code == _Code.BYTES:
            return bytes(raw)
        dtype, shape = words
        if code == _Code.ARRAY:
            return _array(dtype, shape, raw)
        if code == _Code.TENSOR:
            return _tensor(dtype, shape, raw)
        raise ProtocolError(f"extension {code} is unknown")


def _position(where: Any) -> int:
    if not isinstance(where, int) or where < 1:
        raise ProtocolError(f"{where!r} names no buffer")
    return where


# ---------------------------------------------------------------------------------------------------- arrays


def _bytes_of_array(array: npt.NDArray[Any]) -> Buffer:
    if not _DTYPE.fullmatch(array.dtype.str):
        raise ProtocolError(f"an array of dtype {array.dtype} has no form on a wire; send numbers")
    if not array.size:
        return b""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _array(dtype: Any, shape: Any, raw: Buffer) -> npt.NDArray[Any]:
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ProtocolError(f"{dtype!r} is no dtype of numbers")
    return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)


def _tensor_dtype(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TENSOR_DTYPES or tensor.layout != sys.modules["torch"].strided:
        raise ProtocolError(f"a tensor of {tensor.dtype}, {tensor.layout} has no form on a wire")
    if tensor.device.type != "cpu":
        raise ProtocolError(f"a tensor on {tensor.device} does not travel; move it with .cpu() first")
    return name


def _bytes_of_tensor(tensor: Any, torch: Any) -> Buffer:
    if not tensor.numel():
        return b""
    flat = tensor.detach().contiguous().reshape(-1)
    return cast("memoryview", flat.view(torch.uint8).numpy().data)


def _tensor(dtype: Any, shape: Any, raw: Buffer) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ProtocolError("a tensor arrived, but torch is not loaded in this process; import it before listening")
    if dtype not in _TENSOR_DTYPES or not hasattr(torch, dtype):
        raise ProtocolError(f"{dtype!r} is no dtype that this torch knows")
    if not len(raw):
        if 0 not in shape:
            raise ProtocolError(f"a tensor of shape {shape} has no bytes")
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


# ------------------------------------------------------------------------------------------------ structuring


def _create_converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    converter.register_unstructure_hook_func(_is_ref, lambda ref: _refuse_ref(ref.address))
    converter.register_structure_hook_func(_is_ref, lambda data, _: _refuse_ref(data))
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
    """A union: plain values as they are, others with the name of their class among the union's own."""

    def __init__(self, converter: cattrs.Converter, kind: Any) -> None:
        self._converter = converter
        self._plain = tuple(member for member in get_args(kind) if member in (*_PLAIN, NoneType))
        self._members = {member.__name__: member for member in get_args(kind) if member not in self._plain}
        self._kind = kind

    def to_data(self, value: Any) -> Any:
        member = self._members.get(type(value).__name__)
        if member is not None:
            return [type(value).__name__, self._converter.unstructure(value, member)]
        if isinstance(value, np.generic):
            value = value.item()
        return self._checked(value)

    def from_data(self, data: Any, _: Any) -> Any:
        if not isinstance(data, list):
            return self._checked(data)
        name, inner = data
        if name not in self._members:
            raise ProtocolError(f"{name!r} is none of {self._kind}")
        return self._converter.structure(inner, self._members[name])

    def _checked(self, value: Any) -> Any:
        if isinstance(value, self._plain) or (isinstance(value, int) and float in self._plain):
            return value
        raise ProtocolError(f"a {type(value).__qualname__} is none of {self._kind}")


def _any_to_data(value: Any) -> Any:
    """Values whose field says ``Any``: data of JSON, tuples, arrays, tensors. What else they are would be lost."""
    kind = type(value)
    if kind is list:
        return [_any_to_data(inner) for inner in value]
    if kind is tuple:
        return _Tuple([_any_to_data(inner) for inner in value])
    if isinstance(value, dict):
        return {_key(key): _any_to_data(inner) for key, inner in value.items()}
    if kind is bytes and len(value) > _INLINE_BYTES:
        return _Long(value)
    if value is None or kind in (*_PLAIN, bytes) or isinstance(value, (np.ndarray, np.generic)):
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value
    raise ProtocolError(
        f"a {kind.__qualname__} in a field of type Any has no form on a wire; send data of JSON, or arrays"
    )


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise ProtocolError(f"{key!r} is no key of a mapping on a wire; use strings")
    return key


def _instance(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ProtocolError(f"a {type(value).__qualname__} is no {kind.__qualname__}")
    return value


def _refuse_ref(what: Address | Any) -> NoReturn:
    raise ProtocolError(f"refs do not travel inside messages ({what}); expose the actor on the connection instead")


def _is_ref(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Ref)


def _is_array(kind: Any) -> bool:
    return (get_origin(kind) or kind) is np.ndarray


def _is_any(kind: Any) -> bool:
    """Also mappings to ``Any``, which cattrs would pass on as they are."""
    return kind is Any or (get_origin(kind) in (Mapping, dict) and get_args(kind)[1] is Any)


def _is_choice(kind: Any) -> bool:
    """Unions of more than one thing beside ``None``; ``X | None`` is what cattrs does well."""
    return get_origin(kind) in (Union, UnionType) and len([m for m in get_args(kind) if m is not NoneType]) > 1
