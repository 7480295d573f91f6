"""Rows for other trainers: the files that their loaders read. ``test_loaders`` reads them with the loaders."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import assume, given, settings
from tests.interchange.conftest import branching_row, row_batches

from areal_actors.errors import ConfigError, ExportError
from areal_actors.interchange import FORMATS, dump_path, export_rows, require_format, write_rows


def verl_rows(path):
    """Ids, masks, log-probabilities and advantages of each row, without its padding."""
    for document in (torch.load(file, weights_only=False) for file in sorted(path.glob("batch_*.pt"))):
        tensors = {name: tensor.numpy() for name, tensor in document["tensors"].items()}
        width = tensors["prompts"].shape[1]
        for index, attention in enumerate(tensors["attention_mask"]):
            ids = tensors["input_ids"][index][attention == 1]
            length = int(attention[:width].sum())
            parts = [
                tensors[key][index][: len(ids) - length] for key in ("response_mask", "rollout_log_probs", "advantages")
            ]
            yield ids, *(np.concatenate([np.zeros(length), part]) for part in parts)


def trl_rows(path):
    """The same from TRL's columns."""
    for file in sorted(path.glob("data/*.parquet")):
        for row in pq.read_table(file).to_pylist():
            assert row["input_ids"] == row["prompt_ids"] + row["completion_ids"]
            zeros = [0] * len(row["prompt_ids"])
            mask = [int(label != -100) for label in row["labels"]]
            assert mask == zeros + row["env_mask"]
            yield row["input_ids"], mask, zeros + row["logprobs"], zeros + row["advantages"]


def slime_rows(path):
    """The same from slime's samples."""
    for file in sorted(path.glob("rollout_*.pt")):
        for sample in torch.load(file, weights_only=False)["samples"]:
            zeros = [0] * (len(sample["tokens"]) - sample["response_length"])
            advantages = sample["metadata"]["advantages"]
            yield sample["tokens"], zeros + sample["loss_mask"], zeros + sample["rollout_log_probs"], zeros + advantages


def prime_rows(path):
    """The same from prime-rl's micro batches."""
    for file in sorted(path.glob("step_*/rank_0.bin")):
        for batch in msgspec.msgpack.decode(file.read_bytes()):
            ids, mask, advantages, logprobs = batch[:4]
            yield ids, [int(is_trained) for is_trained in mask], logprobs, advantages


READERS = {"verl": verl_rows, "trl": trl_rows, "slime": slime_rows, "prime-rl": prime_rows}


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=12)
@given(row_batches())
def test_export_formats_keep_every_token(tmp_path_factory, form, rows):
    """Ids, masks, log-probabilities and advantages of every row that trains something are in the files."""
    trained = [row for row in rows if row.loss_mask.any()]
    assume(trained)
    root = tmp_path_factory.mktemp("formats")
    write_rows(dump_path(root, 1), rows)
    exported = export_rows({1: dump_path(root, 1)}, form, root / "out")
    found = list(READERS[form](root / "out"))

    assert (len(trained), sum(int(row.loss_mask.sum()) for row in trained)) == (
        exported.num_rows,
        exported.num_trained_tokens,
    )
    for row, (ids, mask, logprobs, advantages) in zip(trained, found, strict=True):
        np.testing.assert_array_equal(ids, row.token_ids)
        np.testing.assert_array_equal(mask, row.loss_mask)
        np.testing.assert_array_equal(np.asarray(logprobs, np.float32), row.logprobs)
        np.testing.assert_array_equal(np.asarray(advantages, np.float32), row.advantages)


def test_verl_export_has_scores_and_logprobs(tmp_path, write_step):
    """The reward at the last token of each response; sampled log-probabilities where the trainer has none."""
    rows = branching_row()
    export_rows(write_step(rows), "verl", tmp_path / "out")
    document = torch.load(tmp_path / "out" / "batch_0.pt", weights_only=False)
    tensors = document["tensors"]
    ends = tensors["attention_mask"][:, tensors["prompts"].shape[1] :].sum(1) - 1

    assert tensors["token_level_scores"].sum(1).tolist() == [row.reward for row in rows]
    assert [tensors["token_level_scores"][0, ends[0]].item()] == [1.0]
    mask = tensors["response_mask"] == 1
    old, sampled = tensors["old_log_probs"], tensors["rollout_log_probs"]
    assert (old[0][mask[0]] == -1.5).all()
    assert (old[1][mask[1]] == sampled[1][mask[1]]).all()
    assert document["non_tensors"]["uid"].tolist() == ["3-0", "3-0", "3-1", "3-1"]
    assert document["meta_info"] == {"areal_actors_step": 3, "temperature": 1.0}
    assert tensors["position_ids"][0, -1] == tensors["attention_mask"][0].sum() - 1


def test_slime_export_has_the_fields_of_a_sample(tmp_path, write_step):
    """Groups and rows are counted from 0; an answer that was cut is truncated."""
    export_rows(write_step(branching_row()), "slime", tmp_path / "out")
    document = torch.load(tmp_path / "out" / "rollout_0.pt", weights_only=False)

    assert document["rollout_id"] == 0
    assert [sample["group_index"] for sample in document["samples"]] == [0, 0, 1, 1]
    assert [sample["status"] for sample in document["samples"]] == ["completed"] * 3 + ["truncated"]
    assert document["samples"][0]["weight_versions"] == ["2"]
    assert len(document["samples"][0]["loss_mask"]) == document["samples"][0]["response_length"]


def test_export_files_are_numbered_and_in_the_manifest(tmp_path, write_step):
    """Steps 3 and 8 are the rollouts 0 and 1."""
    dumps = write_step(branching_row(), 3) | write_step(branching_row(1), 8)
    exported = export_rows(dumps, "prime-rl", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "areal_actors.json").read_text())

    assert {0: 3, 1: 8} == exported.files
    assert {"0": 3, "1": 8} == manifest["files"]
    assert (tmp_path / "out" / "step_1" / "rank_0.bin").exists()


def test_export_is_replaced_only_on_request(tmp_path, write_step):
    """A directory with content is refused and keeps it; nothing partial is left."""
    dumps = write_step(branching_row())
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")

    with pytest.raises(ExportError, match=r"exists already.*--force"):
        export_rows(dumps, "trl", out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    export_rows(dumps, "trl", out, replace=True)
    assert {path.name for path in out.iterdir()} == {"data", "areal_actors.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"rows", "out"}


def test_unknown_formats_and_empty_steps_are_refused(tmp_path, write_step):
    """With the nearest names; a step without a trained token has nothing to export, and writes nothing."""
    with pytest.raises(ConfigError, match=r"'slim'.*did you mean slime\?"):
        require_format("slim")
    with pytest.raises(ConfigError, match=r"'parquet' of rows; there are verl, trl, slime, prime-rl$"):
        require_format("parquet")
    with pytest.raises(ExportError, match="no rows with a trained token"):
        export_rows(write_step([]), "verl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
