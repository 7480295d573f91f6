"""Rows in the formats of other trainers: verl, TRL, slime and prime-rl.

Every exported row is one branch of a session, from its first token to its last, with the exact ids, the sampler's
log-probabilities and the advantages of the step that trained it. A sampled token that several branches share has
mask 1 in one of them and 0 in the others, so nothing is trained twice. The prompt of a row ends before its first
trained token, and masked tokens after it (tool results, answers that another row trains) are masked in the response.

Each format is read by the trainer's own code:

========  ==============================  ==========================================================================
verl      ``batch_<n>.pt``                ``DataProto.from_dict(**torch.load(path, weights_only=False))``
TRL       ``data/step-<n>.parquet``       ``load_dataset("parquet", data_dir=...)``, for ``SFTTrainer`` and a
                                          ``rollout_func`` of ``GRPOTrainer``
slime     ``rollout_<n>.pt``              ``--load-debug-rollout-data rollout_{rollout_id}.pt``
prime-rl  ``step_<n>/rank_0.bin``         the receiver of batches over the file system
========  ==============================  ==========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import asdict, field, frozen

from areal_actors.errors import ConfigError, ExportError
from areal_actors.interchange.rows import INSTALL_PARQUET, DumpedRow, has_parquet, read_rows
from areal_actors.lib.atomic_write import atomic_directory

MANIFEST = "areal_actors.json"
"""The file of an export that says which steps its files hold."""


@frozen(kw_only=True)
class RowExport:
    """An export of rows. ``files`` maps the number of a file in the other trainer to the training step."""

    format: str
    path: Path
    num_rows: int
    num_trained_tokens: int
    files: Mapping[int, int] = field(factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict for ``json.dumps``."""
        return asdict(self) | {"path": str(self.path), "files": {str(key): step for key, step in self.files.items()}}


def require_format(name: str) -> str:
    """Return ``name``. Raises ``ConfigError`` with the nearest names if there is no such format."""
    if name in FORMATS:
        return name
    near = get_close_matches(name.lower(), FORMATS, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"There is no format {name!r} of rows; there are {', '.join(FORMATS)}{hint}")


def export_rows(dumps: Mapping[int, Path], form: str, directory: Path, *, replace: bool = False) -> RowExport:
    """Write the rows of ``dumps`` (files by step) to ``directory`` in the format ``form`` of another trainer.

    One step is in memory at a time. The directory is written completely or not at all. Files are numbered from 0, as
    slime and prime-rl count, and ``areal_actors.json`` says which step each one holds.

    Raises:
        ConfigError: the format is unknown, or pyarrow is not installed.
        ExportError: there are no rows, a file is damaged, or ``directory`` has content and ``replace`` is not set.
        OSError: the files cannot be written.
    """
    write = FORMATS[require_format(form)]
    if not has_parquet():
        raise ConfigError(f"Rows are stored as parquet, which needs pyarrow: {INSTALL_PARQUET}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())) and not replace:
        raise ExportError(f"{directory} exists already; name another one with --output, or replace it with --force.")
    files: dict[int, int] = {}
    num_rows = num_tokens = 0
    with atomic_directory(directory) as partial:
        for step, path in dumps.items():
            # A row without a trained token has no response, which other trainers reject.
            rows = [row for row in read_rows(path) if row.loss_mask.any()]
            if not rows:
                continue
            # Numbered without gaps, as slime and prime-rl count.
            write(partial, len(files), step, rows)
            num_rows += len(rows)
            num_tokens += int(sum(row.loss_mask.sum() for row in rows))
            files[len(files)] = step
        if not files:
            raise ExportError("The chosen steps have no rows with a trained token.")
        export = RowExport(format=form, path=directory, num_rows=num_rows, num_trained_tokens=num_tokens, files=files)
        (partial / MANIFEST).write_text(json.dumps(export.to_json() | {"path": "."}) + "\n", encoding="utf-8")
    return export


# -------------------------------------------------------------------------------------------------------- verl


def _write_verl(directory: Path, number: int, step: int, rows: Sequence[DumpedRow]) -> None:
    """Write the arguments of ``DataProto.from_dict``: prompts padded on the left, responses on the right.

    ``old_log_probs`` are the trainer's where it computed them, and the sampler's elsewhere. The reward of the episode
    is the score of a row's last token. ``uid`` is the group, as for GRPO in verl; rows of one episode share
    ``session``.
    """
    import torch

    prompt = max(row.prompt_length for row in rows)
    response = max(row.response_length for row in rows)

    def pad(values: Callable[[DumpedRow], npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
        """Return [B, R] of the parts of ``values`` [T] that belong to responses."""
        padded = np.zeros((len(rows), response), dtype=dtype)
        for line, row in zip(padded, rows, strict=True):
            line[: row.response_length] = values(row)[row.prompt_length :]
        return padded

    prompts = np.zeros((len(rows), prompt), dtype=np.int64)
    attention = np.zeros((len(rows), prompt + response), dtype=np.int64)
    scores = np.zeros((len(rows), response), dtype=np.float32)
    for index, row in enumerate(rows):
        prompts[index, prompt - row.prompt_length :] = row.token_ids[: row.prompt_length]
        attention[index, prompt - row.prompt_length : prompt + row.response_length] = 1
        scores[index, row.response_length - 1] = row.reward
    responses = pad(lambda row: row.token_ids, np.int64)
    arrays = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.clip(attention.cumsum(axis=1) - 1, 0, None),
        "response_mask": pad(lambda row: row.loss_mask, np.int64),
        "rollout_log_probs": pad(lambda row: row.logprobs, np.float32),
        "old_log_probs": pad(
            lambda row: np.where(np.isnan(row.trainer_logprobs), row.logprobs, row.trainer_logprobs), np.float32
        ),
        "token_level_scores": scores,
        "token_level_rewards": scores.copy(),
        "advantages": pad(lambda row: row.advantages, np.float32),
        "returns": pad(lambda row: row.returns, np.float32),
    }
    non_tensors = {
        "uid": _objects(f"{row.step}-{row.group}" for row in rows),
        "session": _objects(row.session for row in rows),
        "data_source": _objects("areal_actors" for _ in rows),
    }
    temperatures = {float(value) for row in rows for value in row.temperatures[row.loss_mask == 1]}
    meta: dict[str, float] = {"areal_actors_step": step}
    if len(temperatures) == 1:  # verl has one for all tokens
        meta["temperature"] = temperatures.pop()
    document = {
        "tensors": {name: torch.from_numpy(array) for name, array in arrays.items()},
        "non_tensors": non_tensors,
        "meta_info": meta,
    }
    torch.save(document, directory / f"batch_{number}.pt")


def _objects(values: Any) -> npt.NDArray[np.object_]:
    return np.array(list(values), dtype=object)


# --------------------------------------------------------------------------------------------------------- TRL


def _write_trl(directory: Path, number: int, step: int, rows: Sequence[DumpedRow]) -> None:  # noqa: ARG001
    """Write the columns of ``SFTTrainer`` (``input_ids``, ``labels``) and of a rollout of ``GRPOTrainer``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = []
    for row in rows:
        length, (prompt, completion) = row.prompt_length, row.text
        records.append(
            {
                "input_ids": row.token_ids,
                # What SFTTrainer's loss leaves out; its collator pads with the same number.
                "labels": np.where(row.loss_mask == 1, row.token_ids, -100),
                "prompt": prompt,
                "completion": completion,
                "prompt_ids": row.token_ids[:length],
                "completion_ids": row.token_ids[length:],
                "logprobs": row.logprobs[length:],
                "env_mask": row.loss_mask[length:],
                "advantages": row.advantages[length:],
                "reward": row.reward,
                "group": f"{row.step}-{row.group}",
                "session": row.session,
            }
        )
    ids, numbers = pa.list_(pa.int64()), pa.list_(pa.float32())
    kinds = {"prompt": pa.string(), "completion": pa.string(), "group": pa.string(), "session": pa.string()}
    kinds |= {"reward": pa.float64(), "logprobs": numbers, "advantages": numbers}
    schema = pa.schema([(name, kinds.get(name, ids)) for name in records[0]])
    path = directory / "data" / f"step-{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    arrays = [pa.array([record[name] for record in records], type=schema.field(name).type) for name in schema.names]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path)


# ------------------------------------------------------------------------------------------------------- slime


def _write_slime(directory: Path, number: int, step: int, rows: Sequence[DumpedRow]) -> None:
    """Write a rollout as slime dumps its own: the fields of ``Sample`` as dictionaries.

    ``group_index`` counts the groups of the step and ``index`` its rows.
    """
    import torch

    groups = {group: index for index, group in enumerate(dict.fromkeys(row.group for row in rows))}
    samples = []
    for index, row in enumerate(rows):
        length, (prompt, response) = row.prompt_length, row.text
        versions = row.versions[row.versions >= 0]
        samples.append(
            {
                "group_index": groups[row.group],
                "index": index,
                "prompt": prompt,
                "tokens": row.token_ids.tolist(),
                "response": response,
                "response_length": row.response_length,
                "reward": row.reward,
                "loss_mask": row.loss_mask[length:].tolist(),
                "rollout_log_probs": row.logprobs[length:].tolist(),
                "weight_versions": [str(version) for version in dict.fromkeys(versions.tolist())],
                "status": "truncated" if row.finish == "length" else "completed",
                "session_id": row.session,
                "metadata": {
                    "step": step,
                    "task": row.task,
                    "source": row.source,
                    "member": row.member,
                    "row_return": row.row_return,
                    "advantages": row.advantages[length:].tolist(),
                },
            }
        )
    torch.save({"rollout_id": number, "samples": samples}, directory / f"rollout_{number}.pt")


# ---------------------------------------------------------------------------------------------------- prime-rl


def _write_prime_rl(directory: Path, number: int, step: int, rows: Sequence[DumpedRow]) -> None:  # noqa: ARG001
    """Write one micro batch per row for the only data rank.

    prime-rl encodes structs as arrays, by position. These are the fields of ``MicroBatch`` without a default; the
    optional ones follow them, and a decoder sets those that are missing.
    """
    import msgspec

    batches = []
    for row in rows:
        num_tokens, is_trained = len(row.token_ids), row.loss_mask == 1
        batches.append(
            [
                row.token_ids.tolist(),
                is_trained.tolist(),
                row.advantages.tolist(),
                row.logprobs.tolist(),
                list(range(num_tokens)),
                [num_tokens],  # sequence_lengths
                # Greedy tokens have the temperature 0, by which the trainer would divide the logits of masked tokens.
                np.where(is_trained, row.temperatures, 1.0).tolist(),
                [row.tag or "areal_actors"] * num_tokens,  # env_names
                [num_tokens],  # seq_lens
            ]
        )
    path = directory / f"step_{number}" / "rank_0.bin"
    path.parent.mkdir()
    path.write_bytes(msgspec.msgpack.encode(batches))


FORMATS: Mapping[str, Callable[[Path, int, int, Sequence[DumpedRow]], None]] = {
    "verl": _write_verl,
    "trl": _write_trl,
    "slime": _write_slime,
    "prime-rl": _write_prime_rl,
}
"""Functions that write the rows of one step, by the name of the trainer."""
