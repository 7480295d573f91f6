"""What was published last, kept: whole, in buckets of bounded size, unchanged by the next step, on disk when asked."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from attrs import define
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from areal_actors.errors import CheckpointError, EngineError
from areal_actors.training.weight_store import StorePublisher, WeightStore, pack_buckets


@define
class Policy:
    """A model at a version."""

    model: torch.nn.Module
    version: int = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())


@pytest.fixture
def policy(make_model) -> Policy:
    return Policy(make_model("llama", seed=1))


@given(sizes=st.lists(st.integers(0, 40), max_size=30), max_bytes=st.integers(1, 120))
def test_buckets_hold_every_tensor_once_in_order_and_are_bounded(sizes: list[int], max_bytes: int) -> None:
    """No bucket is larger than allowed unless one tensor is, none is empty, and no two neighbours would fit in one."""
    tensors = {f"t{number}": torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    buckets = list(pack_buckets(tensors, max_bytes))
    filled = [[tensors[name].nbytes for name in bucket.names] for bucket in buckets]

    assert [name for bucket in buckets for name in bucket.names] == list(tensors)
    assert all(sum(sizes) <= max_bytes or len(sizes) == 1 for sizes in filled)
    assert all(sum(left) + right[0] > max_bytes for left, right in pairwise(filled))
    for bucket in buckets:
        assert bucket.shapes == tuple(tuple(tensors[name].shape) for name in bucket.names)
        assert set(bucket.dtypes) == {"uint8"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_store_holds_the_published_weights(policy: Policy, tmp_path: Path, dtype: str) -> None:
    """In the engine's dtype, by the names of checkpoints; the next step of the trainer does not change it."""
    store = WeightStore(root=tmp_path, bucket_bytes=1 << 16)
    snapshot = StorePublisher(store=store, dtype=dtype).publish(policy)
    wanted = {name: tensor.detach().clone().to(getattr(torch, dtype)) for name, tensor in policy.state_dict().items()}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    kept = store.take(snapshot.version)
    found = {
        name: tensor
        for number, bucket in enumerate(kept.buckets)
        for name, tensor in zip(bucket.names, kept.tensors_of(number), strict=True)
    }

    assert snapshot.is_kept
    assert not snapshot.is_empty
    assert found
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    assert not list(tmp_path.iterdir())
    written = load_file(store.write(snapshot.version) / "model.safetensors")
    assert written.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in written.items())


def test_one_version_is_kept_and_written_once(policy: Policy, tmp_path: Path) -> None:
    """Who asks for another version is told which there is; asked twice, there is one directory, which stays."""
    store = WeightStore(root=tmp_path, bucket_bytes=1 << 16)
    with pytest.raises(EngineError, match="none is"):
        store.take(0)
    StorePublisher(store=store).publish(policy)
    first = store.write(0)
    written = (first / "model.safetensors").stat().st_ino
    assert store.write(0) == first
    assert (first / "model.safetensors").stat().st_ino == written

    policy.version = 1
    StorePublisher(store=store).publish(policy)
    with pytest.raises(EngineError, match="version 1 is"):
        store.write(0)
    store.write(1)
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]


def test_a_disk_that_refuses_is_named(policy: Policy, tmp_path: Path) -> None:
    """The error is that of all checkpoints; what is kept stays kept."""
    (tmp_path / "file").touch()
    store = WeightStore(root=tmp_path / "file" / "published", bucket_bytes=1 << 16)
    StorePublisher(store=store).publish(policy)
    with pytest.raises(CheckpointError, match="published"):
        store.write(0)

    assert store.take(0).version == 0
