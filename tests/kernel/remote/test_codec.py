"""Every message of the library, and every kind of array, as bytes and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_actors import messages
from areal_actors.domain import Snapshot
from areal_actors.errors import ProtocolError
from areal_actors.kernel import Address, Message, Ref
from areal_actors.kernel.message import AnyMessage, reply_of
from areal_actors.kernel.remote.codec import Codec

KINDS = [
    value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, AnyMessage) and attrs.has(value)
]
AT_HOME = {messages.WatchSessions, messages.UseModel, messages.AddReplica}
"""They or their replies contain refs; they are used within one system."""
TRAVELLING = [kind for kind in KINDS if kind not in AT_HOME]
RECURSIVE = {"part", "parts"}
# Half a surrogate pair and integers of any size included, as Python's JSON parser reads them.
TEXTS = st.text(st.characters(), max_size=6)
SCALARS = {
    str: TEXTS,
    int: st.integers(-(2**80), 2**80),
    float: st.floats(),
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    NoneType: st.none(),
    Path: st.just(Path("/somewhere/else")),
    Any: st.recursive(
        st.none() | TEXTS | st.integers(-(2**80), 2**80) | st.booleans() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(TEXTS, inner),
        max_leaves=4,
    ),
}


def values_of(kind: Any, depth: int = 0) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - a case each
    """Values of a declared type, as deep as they are useful."""
    kind = getattr(kind, "__supertype__", kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in SCALARS or kind is None:
        return SCALARS[kind or NoneType]
    if origin in (Union, UnionType):
        fitting = [one for one in arguments if depth < 3 or not RECURSIVE & set(dir(one))]
        return st.one_of([st.deferred(lambda one=one: values_of(one, depth + 1)) for one in fitting])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0], depth + 1), max_size=2 if depth < 5 else 0).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(one, depth + 1) for one in arguments))
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1], depth + 1), max_size=2)
    if origin is np.ndarray:
        return st.lists(st.integers(0, 9), max_size=3).map(lambda items: np.array(items, dtype=np.int32))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    hints = get_type_hints(kind)
    fields = {one.name: values_of(hints[one.name], depth + 1) for one in attrs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda data: built(kind, data))


def built(kind: type, data: dict[str, Any]) -> Any:
    """An instance; arrays of one class have to be of one length in some of them."""
    lengths = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
    if lengths:
        shortest = min(map(len, lengths.values()))
        data = data | {name: value[:shortest] for name, value in lengths.items()}
    return kind(**data)


def same(left: Any, right: Any) -> bool:  # noqa: PLR0911 - a case each
    """Equality that looks into arrays, into what attrs leaves out, and takes not-a-numbers for equal."""
    if isinstance(left, (np.ndarray, torch.Tensor)):
        left, right = np.asarray(left), np.asarray(right)
        return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right, equal_nan=True)
    if isinstance(left, float):
        return isinstance(right, float) and (left == right or (left != left and right != right))  # noqa: PLR0124
    if type(left) is not type(right):
        return False
    if attrs.has(type(left)):
        return all(same(getattr(left, one.name), getattr(right, one.name)) for one in attrs.fields(type(left)))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def through(value: Any, kind: Any) -> Any:
    """There and back, buffers as the other side would hold them."""
    parts = [bytes(part) if number == 0 else bytearray(part) for number, part in enumerate(encoded(value, kind))]
    return Codec().from_data(Codec().decode(parts)[0], kind, "it")


def encoded(value: Any, kind: Any) -> list[Any]:
    codec = Codec()
    return codec.encode([codec.to_data(value, kind, "it")])


@pytest.mark.parametrize("kind", TRAVELLING, ids=lambda kind: kind.__name__)
@settings(max_examples=8)
@given(data=st.data())
def test_codec_restores_every_message(kind, data):
    """With all its fields, whatever is in them."""
    try:
        message = data.draw(values_of(kind))
    except ValueError:
        return  # a class that checks its values; others are drawn
    assert same(message, through(message, kind))


@pytest.mark.parametrize("kind", TRAVELLING, ids=lambda kind: kind.__name__)
@settings(max_examples=8)
@given(data=st.data())
def test_codec_restores_every_reply(kind, data):
    """And every item of a stream."""
    declared = reply_of(kind)
    try:
        reply = data.draw(values_of(declared))
    except ValueError:
        return
    assert same(reply, through(reply, declared))


@pytest.mark.parametrize("dtype", ["?", "i1", "<i4", ">i4", "u8", "f2", "<f4", "f8", "c8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (100, 200)])
def test_codec_restores_arrays(dtype, shape):
    """Every dtype of numbers, every shape, inline or as a separate buffer; they can be written to."""
    array = (np.arange(int(np.prod(shape))) % 2).astype(dtype).reshape(shape)
    received = through({"x": array}, Any)["x"]

    assert same(array, received)
    assert received.flags.writeable or not received.size


def test_codec_restores_arrays_that_are_not_contiguous():
    """They are made so."""
    array = np.arange(20_000, dtype=np.int64).reshape(100, 200)[::2, ::-1]

    assert same(array, through(array, Any))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(0,), (3,), (70, 80)])
def test_codec_restores_tensors(dtype, shape):
    """As raw memory, dtypes that numpy does not know included."""
    tensor = torch.ones(shape, dtype=torch.float32).to(dtype)
    received = through(
        messages.PublishWeights(snapshot=Snapshot(version=1, state={"w": tensor})), messages.PublishWeights
    ).snapshot.state["w"]

    assert (dtype, tensor.shape) == (received.dtype, received.shape)
    assert torch.equal(tensor.float(), received.float())


def test_codec_does_not_copy_large_arrays():
    """The buffer is the array's own memory."""
    array = np.zeros(100_000)
    array_part = encoded(array, Any)[1]
    array[0] = 7

    assert np.frombuffer(array_part)[0] == 7


def test_codec_refuses_tensors_without_torch(monkeypatch):
    """Nothing is imported because a peer says so."""
    parts = encoded({"w": torch.ones(2)}, Any)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ProtocolError, match="torch is not loaded"):
        Codec().decode(parts)


class Post:
    """Address of a post office."""


@frozen(kw_only=True)
class Letter(Message[Post, None]):
    content: Any = None
    to: Ref[Post] | None = None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (object(), "a object in a field of type Any"),
        ({"deep": [{1, 2}]}, "a set in a field of type Any"),
        ({(1, 2): 3}, "not a key of a mapping"),
        (np.array(["text"]), "dtype <U4 has no form"),
        (np.array([object()]), "dtype object has no form"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo has no form"),
    ],
)
def test_codec_refuses_values_without_a_wire_format(content, complaint):
    """At the sender, before anything is sent."""
    with pytest.raises(ProtocolError, match=complaint):
        encoded(Letter(content=content), Letter)


def test_codec_refuses_data_nested_too_deeply():
    """The depth of Python's own stack bounds both directions."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ProtocolError, match="cannot be sent"):
        encoded(Letter(content=deep), Letter)
    with pytest.raises(ProtocolError):
        Codec().decode([b"\x91" * 1_000_000])


@given(st.binary(max_size=60))
def test_codec_refuses_garbage(data):
    """With one kind of error only."""
    codec = Codec()
    try:
        codec.from_data(codec.decode([data, bytearray(4)]), messages.Complete, "it")
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "words",
    [
        [1, b"\x93\xa2i4\x91\xcf" + b"\xff" * 8 + b"\x01"],
        [1, b"\x93\xa1O\x90\xc4\x00"],
        [2, b"\x93\xa6system\x90\xc4\x00"],
        [1, b"\x93\xa2i4\x91\x02\x05"],
        [9, b"\x91\xc4\x00"],
        [3, b"\x91\x00"],
    ],
)
def test_codec_refuses_malformed_extensions(words):
    """About shapes, dtypes, buffers and themselves."""
    code, data = words
    with pytest.raises(ProtocolError):
        Codec().decode([b"\x91\xc7" + bytes([len(data), code]) + data])


def test_codec_refuses_refs():
    """Refs are had from a peer, not from mail."""
    ref = type("Nowhere", (Ref,), {"address": Address(node="a", name="b")})
    ref.__abstractmethods__ = frozenset()
    with pytest.raises(ProtocolError, match="Letter cannot be sent: refs do not travel"):
        Codec().to_data(Letter(to=ref()), Letter, "Letter")
