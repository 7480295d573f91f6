"""Bodies of Tinker's API: data and results in protobuf, as the SDK's own definitions describe them.

The definitions come with the ``tinker`` package and change with it, so they are not repeated here. Everything else on
the wire is JSON, which the application reads itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2

from areal_actors.domain import Completion, FinishReason, Floats, Ints
from areal_actors.errors import InvalidRequest, UnsupportedParameter

# The generated module has no types that a checker could read without the SDK's stubs.
_pb = cast("Any", tinker_public_pb2)

PROTOBUF = "application/x-protobuf"
Array = npt.NDArray[Any]
_NO_LOGPROB = -99999.0
"""What Tinker writes in empty places of alternatives."""
_DTYPES: Mapping[int, np.dtype[Any]] = {
    _pb.DTYPE_FLOAT32: np.dtype("<f4"),
    _pb.DTYPE_INT64: np.dtype("<i8"),
    _pb.DTYPE_INT32: np.dtype("<i4"),
}


@frozen(kw_only=True)
class Datum:
    """One example: the tokens that the model reads, int32 [N], and the inputs of the loss by name, each [N] or [N, K].

    Position ``i`` of an input belongs to the prediction that is made after token ``i``.
    """

    tokens: Ints = field(eq=False)
    inputs: Mapping[str, Array] = field(eq=False)


@frozen(kw_only=True)
class PassRequest:
    """A forward pass over ``data``, and a backward pass unless ``is_forward_only``."""

    model_id: str
    seq_id: int
    loss: str
    settings: Mapping[str, float | str]
    data: tuple[Datum, ...]
    is_forward_only: bool


def decode_pass(body: bytes) -> Any:
    """Return the message in ``body``, whose ``model_id`` and ``seq_id`` are known. Raises ``InvalidRequest``."""
    message = _pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"The body is no ForwardBackwardRequest of this protocol: {error}") from error
    return message


def parse_pass(message: Any) -> PassRequest:
    """Return the request in a decoded ``message``. Raises ``InvalidRequest`` and ``UnsupportedParameter``."""
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        settings[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        loss=message.loss_fn,
        settings=settings,
        data=tuple(_parse_datum(index, datum) for index, datum in enumerate(message.data)),
        is_forward_only=message.forward_only,
    )


def _parse_datum(index: int, datum: Any) -> Datum:  # Any: a generated message
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UnsupportedParameter(f"Datum {index} has a chunk of {kind}; send tokens.", param="data")
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype("<i4"), f"datum {index}"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    inputs = {name: parse_tensor(tensor, f"{name} of datum {index}") for name, tensor in datum.loss_fn_inputs.items()}
    return Datum(tokens=tokens, inputs=inputs)


def parse_tensor(tensor: Any, place: str) -> Array:
    """Return a tensor as an array; of a sparse one, places that are not listed are 0. Raises ``InvalidRequest``."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"The tensor {place} has the unknown data type {tensor.dtype}.", param="data")
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = _numbers(tensor.dense, dtype, place)
        return _reshaped(values, shape or values.shape, place)
    sparse = tensor.sparse_csr
    values = _numbers(sparse.values, dtype, place)
    rows, columns = (_numbers(part, np.dtype("<i8"), place) for part in (sparse.crow_indices, sparse.col_indices))
    is_right = (
        len(shape) == 2  # noqa: PLR2004 - compressed rows
        and len(rows) == shape[0] + 1
        and len(columns) == len(values)
        and rows[0] == 0
        and rows[-1] == len(values)
        and bool((np.diff(rows) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_right:
        raise InvalidRequest(f"The sparse tensor {place} is not in compressed rows of shape {shape}.", param="data")
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _numbers(data: bytes, dtype: np.dtype[Any], place: str) -> Array:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{place} has {len(data)} bytes, which are no whole {dtype} numbers.", param="data")
    return np.frombuffer(data, dtype=dtype)


def _reshaped(values: Array, shape: tuple[int, ...], place: str) -> Array:
    if math.prod(shape) != values.size or min(shape, default=0) < 0:
        raise InvalidRequest(f"The tensor {place} has {values.size} numbers and the shape {shape}.", param="data")
    return values.reshape(shape)


def format_pass(logprobs: Sequence[Floats], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a pass: the log-probabilities of each datum's targets, [N] or [N, K], and metrics."""
    message = _pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    for one in logprobs:  # a record each, since the shapes of data differ
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        array = np.ascontiguousarray(one, dtype="<f4")
        found = record.fields["logprobs"]
        found.data, found.dtype = array.tobytes(), _pb.DTYPE_FLOAT32
        found.offsets = np.array([0, array.nbytes], dtype="<i8").tobytes()
        found.trailing_shape.extend(array.shape[1:])
    return cast("bytes", message.SerializeToString())


@frozen(kw_only=True)
class PromptScores:
    """The log-probabilities of a prompt's tokens, float32 [T] with NaN where none was computed, and alternatives.

    ``top`` are the k most probable tokens at each position and their log-probabilities, [T, k]. ``targets`` are the
    log-probabilities of the tokens that a request named, [T - 1, K].
    """

    logprobs: Floats = field(eq=False)
    top: tuple[Ints, Floats] | None = field(default=None, eq=False)
    targets: Floats | None = field(default=None, eq=False)

    def only_last(self, count: int) -> PromptScores:
        """Return the scores of the last ``count`` tokens, with none for those before."""
        logprobs = self.logprobs.copy()
        logprobs[:-count] = np.nan
        top = None if self.top is None else (self.top[0].copy(), self.top[1].copy())
        if top is not None:
            top[0][:-count], top[1][:-count] = 0, _NO_LOGPROB
        return evolve(self, logprobs=logprobs, top=top)


def format_samples(
    completions: Sequence[Completion], *, num_cached_tokens: int, top: int, prompt: PromptScores | None
) -> bytes:
    """Return the result of sampling, with ``top`` alternatives for each token."""
    message = _pb.SampleResponse(prompt_cache_hit_tokens=num_cached_tokens)
    for completion in completions:
        is_stopped = completion.finish is FinishReason.STOP
        sequence = message.sequences.add(
            stop_reason=_pb.STOP_REASON_STOP if is_stopped else _pb.STOP_REASON_LENGTH,
            tokens=completion.token_ids.astype("<i4").tobytes(),
            logprobs=completion.logprobs.astype("<f4").tobytes(),
        )
        if top:
            ids = np.zeros((len(completion.token_ids), top), dtype=np.int32)
            values = np.full(ids.shape, _NO_LOGPROB, dtype=np.float32)
            for row, found in enumerate(completion.top_logprobs):
                for column, one in enumerate(found[:top]):
                    ids[row, column], values[row, column] = one.token_id, one.logprob
            _write_top(sequence.topk_sampled_logprobs, ids, values)
    if prompt is not None:
        message.prompt_logprobs = prompt.logprobs.astype("<f4").tobytes()
        if prompt.top is not None:
            _write_top(message.topk_prompt_logprobs, *prompt.top)
        if prompt.targets is not None:
            tensor = message.target_prompt_logprobs
            tensor.dense, tensor.dtype = prompt.targets.astype("<f4").tobytes(), _pb.DTYPE_FLOAT32
            tensor.shape.extend(prompt.targets.shape)
    return cast("bytes", message.SerializeToString())


def _write_top(message: Any, ids: Ints, logprobs: Floats) -> None:
    message.length, message.k = ids.shape
    message.token_ids, message.logprobs = ids.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes()
