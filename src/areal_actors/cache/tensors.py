"""Training rows as padded arrays, and as tensors in the last step.

==================  =========  ========  ============================  =======
name                dtype      shape     off the row's own tokens      padding
==================  =========  ========  ============================  =======
``input_ids``       int32      [B, T]                                  0
``attention_mask``  bool       [B, T]                                  False
``loss_mask``       int32      [B, T]    0 where not trained           0
``logprobs``        float32    [B, T]    0 where not trained           0
``versions``        int32      [B, T]    -1 where not sampled          -1
``returns``         float32    [B, T]    0 where not sampled           0
``rewards``         float32    [B]       return of the last turn
``predecessors``    int32      [B, T]                                  -1
``position_ids``    int32      [B, T]                                  0
``temperatures``    float32    [B, T]    -1 where not sampled          -1
``top_ps``          float32    [B, T]    1 where not cut off           1
``top_ks``          int32      [B, T]    0 where not cut off           0
``min_ps``          float32    [B, T]    0 where not cut off           0
==================  =========  ========  ============================  =======

``predecessors`` and ``position_ids`` are present if a row is a tree: the former are indices into the row (see
``domain.rows``) and determine what a token may attend to. ``temperatures`` are present if a row knows its
sampling temperature: -1 in turns of unknown temperature, 0 in greedy ones. The last three are present if sampling was
truncated and the log-probabilities are those after truncation. Rows are padded on the right to the longest of them.

Tensors from user code become training rows, with every row checked. The table lists the allowed names: ``input_ids``
and ``attention_mask`` are required, the others are optional, and so are ``raw_logprobs`` (log-probabilities of the
plain softmax at temperature 1), with which the trainer verifies the captured tokens. A row is a sample. Its outputs are
the runs of ``loss_mask`` with equal sampling settings; each is a turn, with the row's reward as its return unless
``returns`` are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import evolve

from areal_actors.cache.tree import parse_reward
from areal_actors.domain import (
    InteractionId,
    Ints,
    SamplingDistribution,
    SessionId,
    Trajectory,
    TurnInfo,
    is_tree_order,
)
from areal_actors.errors import ExportError

if TYPE_CHECKING:
    import torch

_REQUIRED = ("input_ids", "attention_mask")
_OF_ROWS = ("input_ids", "loss_mask", "logprobs", "versions", "returns")
_BY_TOKEN: dict[str, tuple[type[np.generic], int]] = {
    "input_ids": (np.int32, 0),
    "attention_mask": (np.bool_, 0),
    "loss_mask": (np.int32, 0),
    "logprobs": (np.float32, 0),
    "versions": (np.int32, -1),
    "returns": (np.float32, 0),
    "raw_logprobs": (np.float32, 0),
    "predecessors": (np.int32, -1),
    "position_ids": (np.int32, 0),
    "temperatures": (np.float32, -1),
    "top_ps": (np.float32, 1),
    "top_ks": (np.int32, 0),
    "min_ps": (np.float32, 0),
}
"""The dtype of each tensor, and its padding value."""
_SAMPLING = ("temperatures", "top_ps", "top_ks", "min_ps")
"""Sampling tensors; their padding values are assumed if they are missing. A temperature of -1 is unknown."""
_NUM_AXES = 2
"""Axes of tensors that are given by token: batch and sequence."""
_LOGPROB_SLACK = 1e-3
"""How far rounding may lift the log-probability of a certain token above 0."""

Array = npt.NDArray[Any]


def _neutral(name: str, shape: tuple[int, ...]) -> Array:
    dtype, padding = _BY_TOKEN[name]
    return np.full(shape, padding, dtype)


def to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, Array]:
    """Return the rows as padded arrays, named and typed as in the table above. No rows give arrays with B = T = 0."""
    shape = (len(trajectories), max((row.num_tokens for row in trajectories), default=0))
    lengths = np.array([row.num_tokens for row in trajectories], np.int64)
    arrays = {name: _neutral(name, shape) for name in _OF_ROWS}
    for position, row in enumerate(trajectories):
        for name in _OF_ROWS:
            arrays[name][position, : row.num_tokens] = getattr(row, name)
    arrays["attention_mask"] = np.arange(shape[1])[None, :] < lengths[:, None]
    if any(row.predecessors is not None for row in trajectories):
        arrays |= {name: _neutral(name, shape) for name in ("predecessors", "position_ids")}
        for index, row in enumerate(trajectories):
            own = slice(0, row.num_tokens)
            chain = np.arange(-1, row.num_tokens - 1, dtype=np.int32)
            arrays["predecessors"][index, own] = chain if row.predecessors is None else row.predecessors
            arrays["position_ids"][index, own] = row.position_ids
    arrays |= _sampling_arrays(trajectories, shape)
    arrays["rewards"] = np.array([row.reward for row in trajectories], np.float32)
    return arrays


def _sampling_arrays(trajectories: Sequence[Trajectory], shape: tuple[int, int]) -> dict[str, Array]:
    infos = [info.sampling for row in trajectories for info in row.turn_infos]
    known = [sampling for sampling in infos if sampling is not None]
    if not known:
        return {}
    arrays = {name: _neutral(name, shape) for name in _SAMPLING}
    for index, row in enumerate(trajectories):
        # The last entry is that of tokens of no turn, whose index is -1.
        by_turn = np.array([*(_sampling_values(info.sampling) for info in row.turn_infos), _sampling_values(None)])
        columns = by_turn[np.where(row.turns < len(row.turn_infos), row.turns, -1)].T
        for name, column in zip(_SAMPLING, columns, strict=True):
            arrays[name][index, : row.num_tokens] = column
    is_truncated = any(sampling.has_truncated_logprobs for sampling in known)
    return arrays if is_truncated else {"temperatures": arrays["temperatures"]}


def _sampling_values(sampling: SamplingDistribution | None) -> tuple[float, float, int, float]:
    """Return temperature, top-p, top-k and min-p as the trainer has to apply them."""
    if sampling is None:
        return -1.0, 1.0, 0, 0.0
    if not sampling.has_truncated_logprobs:
        return sampling.temperature, 1.0, 0, 0.0
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p


def to_tensors(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Return the arrays of ``to_arrays`` as torch tensors that share their memory."""
    import torch

    return {name: torch.from_numpy(array) for name, array in to_arrays(trajectories).items()}


def from_tensors(
    tensors: Mapping[str, Any],
    *,
    session: SessionId,
    version: int | None = None,
    sampling_of: Callable[[Ints], SamplingDistribution | None] = lambda _: None,
) -> list[Trajectory]:
    """Return the rows of a dictionary of tensors (or of anything that numpy reads), without their padding.

    Args:
        tensors: by the names in the table above; [B, T] each, ``rewards`` [B].
        session: the session that the rows are attributed to.
        version: the version that sampled, if ``versions`` are missing.
        sampling_of: returns the distribution that a turn with these ids was sampled from, if ``temperatures`` are
            missing.

    Raises:
        ExportError: the dictionary is invalid; the message names the tensor, the row, and the expected value.
    """
    arrays = _read(tensors)
    if version is not None and "versions" not in arrays:
        arrays["versions"] = np.where(
            arrays.get("loss_mask", np.zeros_like(arrays["input_ids"])) == 1, np.int32(version), np.int32(-1)
        )
    num_rows = len(arrays["input_ids"])
    # As float64, so that a number beyond float32 is refused with its value instead of becoming infinite.
    given = _array("rewards", tensors.get("rewards", np.zeros(num_rows)), np.float64)
    if given.shape != (num_rows,):
        raise ExportError(f"rewards must be [batch], here [{num_rows}], not {list(given.shape)}.")
    rewards = [parse_reward(reward) for reward in given]
    rows = [_row(arrays, index, reward, session) for index, reward in enumerate(rewards)]
    if "temperatures" in arrays:
        return rows
    for index, row in enumerate(rows):
        found = [sampling_of(row.input_ids[row.turns == turn]) for turn in range(int(row.turns.max()) + 1)]
        if any(sampling is not None for sampling in found):
            rows[index] = evolve(row, turn_infos=tuple(TurnInfo(sampling=sampling) for sampling in found))
    return rows


def pad_together(results: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return all rows of several dictionaries of tensors, padded on the right to the longest.

    Four dictionaries of [1, T] become one of [4, T]. Raises ``ExportError`` if they do not hold the same tensors, or if
    there is none.
    """
    import torch

    if not results:
        raise ExportError("There are no tensors to be joined.")
    # Neutral tensors stand in where one result lacks a sampling tensor that another has.
    named = {name for result in results for name in result if name in _SAMPLING}
    filled: list[Mapping[str, Any]] = []
    for result in results:
        rows = torch.as_tensor(result["input_ids"]).shape if "input_ids" in result else ()
        missing = (name for name in _SAMPLING if name in named and name not in result)
        neutral = {name: torch.from_numpy(_neutral(name, rows)) for name in missing}
        filled.append(dict(result) | neutral)
    if len({frozenset(result) for result in filled}) > 1:
        held = " and ".join(sorted({"{" + ", ".join(sorted(result)) + "}" for result in filled}))
        raise ExportError(f"These results cannot be joined, for they hold different tensors: {held}.")
    joined: dict[str, torch.Tensor] = {}
    for name in filled[0]:
        tensors = [torch.as_tensor(result[name]) for result in filled]
        if all(tensor.ndim == _NUM_AXES for tensor in tensors):
            pad, length = _BY_TOKEN.get(name, (None, 0))[1], max(tensor.shape[1] for tensor in tensors)
            tensors = [torch.nn.functional.pad(each, (0, length - each.shape[1]), value=pad) for each in tensors]
        else:
            tensors = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors]
        joined[name] = torch.cat(tensors)
    return joined


# ----------------------------------------------------------------------------------------------------- reading


def _read(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Return the tensors by token, all of shape [B, T]."""
    missing = [name for name in _REQUIRED if name not in tensors]
    if missing:
        raise ExportError(
            f"The tensors lack {' and '.join(missing)}; there are {', '.join(sorted(tensors)) or 'none'}."
        )
    unknown = sorted(set(tensors) - {*_BY_TOKEN, "rewards"})
    if unknown:
        known = ", ".join((*_BY_TOKEN, "rewards"))
        raise ExportError(f"Unknown columns {', '.join(map(repr, unknown))}; leave them out. Rows are made of {known}.")
    arrays = {name: _array(name, tensors[name], kind) for name, (kind, _) in _BY_TOKEN.items() if name in tensors}
    shape = arrays["input_ids"].shape
    if len(shape) != _NUM_AXES or 0 in shape:
        raise ExportError(f"input_ids must be [batch, seq] with at least one row and token, not {list(shape)}.")
    for name, array in arrays.items():
        if array.shape != shape:
            raise ExportError(f"{name} is {list(array.shape)}, but input_ids is {list(shape)}; they must be the same.")
    return arrays


def _array(name: str, value: Any, kind: type[np.generic]) -> Array:
    """Return a tensor of any library as an array of ``kind``, if the conversion is lossless."""
    detached = value.detach().cpu() if hasattr(value, "detach") else value
    try:
        # numpy has no bfloat16.
        array = np.asarray(detached.float() if str(getattr(detached, "dtype", "")) == "torch.bfloat16" else detached)
        converted = array.astype(kind)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ExportError(f"{name} is a {type(value).__name__} that is not a tensor of numbers: {error}") from error
    if np.issubdtype(kind, np.floating) and np.issubdtype(array.dtype, np.number):
        return converted
    if array.dtype.kind not in "biuf" or not np.array_equal(converted, array):
        raise ExportError(f"{name} must be {np.dtype(kind)}; what it holds ({array.dtype}) is not.")
    return converted


# -------------------------------------------------------------------------------------------------------- rows


def _row(arrays: Mapping[str, Array], index: int, reward: float, session: SessionId) -> Trajectory:
    places = np.flatnonzero(arrays["attention_mask"][index])
    if not len(places):
        raise ExportError(f"Row {index} has no token under its attention_mask; leave such a row out.")
    if places[-1] - places[0] + 1 != len(places):
        raise ExportError(f"The attention_mask of row {index} has a gap; a row is one sequence, padded at its ends.")
    columns = {name: array[index][places] for name, array in arrays.items() if name != "attention_mask"}
    mask = columns.setdefault("loss_mask", np.zeros(len(places), np.int32))
    if arrays.get("loss_mask", np.zeros(1)).any() and int(arrays["loss_mask"][index].sum()) != int(mask.sum()):
        raise ExportError(f"The loss_mask of row {index} trains padding; it must be 0 where attention_mask is 0.")
    # Predecessors count from the row's first token, without its padding; positions follow from them.
    columns.pop("position_ids", None)
    if "predecessors" in columns:
        inside = columns["predecessors"] >= 0
        columns["predecessors"] = np.where(inside, columns["predecessors"] - int(places[0]), np.int32(-1))
    for complaint in _complaints(columns):
        raise ExportError(f"Row {index}: {complaint}")
    samplings = np.stack([columns.pop(name, _neutral(name, (len(places),))) for name in _SAMPLING], axis=1)
    turns = _turns(mask, samplings)
    columns.setdefault("logprobs", np.zeros(len(places), np.float32))
    columns.setdefault("versions", np.full(len(places), -1, np.int32))
    columns.setdefault("returns", np.where(mask == 1, np.float32(reward), np.float32(0)))
    for name in ("logprobs", "raw_logprobs"):
        if name in columns:
            columns[name] = np.where(mask == 1, columns[name], np.float32(0))
    num_turns = max(int(turns.max()) + 1, 1)
    names = tuple(InteractionId(f"{session}-{index}-{turn}") for turn in range(num_turns))
    firsts = [int(np.argmax(turns == turn)) for turn in range(int(turns.max()) + 1)]
    infos: list[TurnInfo] = []
    for temperature, top_p, top_k, min_p in samplings[firsts].tolist():
        sampling = SamplingDistribution(temperature=temperature, top_p=top_p, top_k=int(top_k), min_p=min_p)
        infos.append(TurnInfo(sampling=None if temperature < 0 else sampling))
    is_known = any(info.sampling is not None for info in infos)
    return Trajectory(
        session=session,
        interactions=names,
        turns=turns,
        reward=reward,
        turn_infos=tuple(infos) if is_known else (),
        **columns,
    )


def _turns(mask: Array, samplings: Array) -> Array:
    """Return for each token the number of its run of trained tokens with equal sampling; -1 elsewhere."""
    begins = np.diff(mask, prepend=0) == 1
    before, after = samplings[:-1], samplings[1:]
    is_alike = (before == after).all(axis=1)
    begins[1:] |= (mask[1:] == 1) & ~is_alike
    return np.where(mask == 1, np.cumsum(begins) - 1, -1).astype(np.int32)


def _complaints(columns: Mapping[str, Array]) -> Iterator[str]:
    mask, trained = columns["loss_mask"], columns["loss_mask"] == 1
    if (columns["input_ids"] < 0).any():
        yield "input_ids has a negative id; pad with 0 and say so in attention_mask."
    if not np.isin(mask, (0, 1)).all():
        yield "loss_mask holds something else than 0 and 1."
    predecessors = columns.get("predecessors", np.arange(-1, len(trained) - 1))
    if not is_tree_order(predecessors):
        yield "predecessors must be -1 or the index of an earlier token of the row."
    elif trained[predecessors < 0].any():
        yield "loss_mask trains the first token of a branch, which nothing predicts."
    if not trained.any():
        return
    for name in ("logprobs", "versions"):
        if name not in columns:
            yield f"tokens are to be trained, and there are no {name}; give those of the ModelResponse."
            return
    logprobs = columns["logprobs"][trained]
    if not np.isfinite(logprobs).all() or (logprobs > _LOGPROB_SLACK).any():
        yield "a trained token has a log-probability that cannot be one."
    if (columns["versions"][trained] < 0).any():
        yield "a trained token has the version -1, which says that nothing sampled it."
    yield from _value_complaints(columns, trained)


_POSSIBLE: Mapping[str, Callable[[Array], Array]] = {
    "temperatures": lambda values: (values == -1) | ((values >= 0) & np.isfinite(values)),
    "top_ps": lambda values: (values > 0) & (values <= 1),
    "top_ks": lambda values: values >= 0,
    "min_ps": lambda values: (values >= 0) & (values <= 1),
}
"""Which values of sampling tensors a token can have been sampled with."""


def _value_complaints(columns: Mapping[str, Array], trained: Array) -> Iterator[str]:
    for name, is_possible in _POSSIBLE.items():
        if name in columns and not is_possible(columns[name][trained]).all():
            yield f"a trained token cannot have been sampled with its {name}."
    if not np.isfinite(columns.get("returns", np.zeros(1))).all():
        yield "returns are not finite."
