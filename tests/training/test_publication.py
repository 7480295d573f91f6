"""Weights that were published by disk are those that would have been lent, and an engine can be started from them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from attrs import define
from transformers import AutoModelForCausalLM

from areal_actors.domain import EngineRequest, SampleKey, Sampling, Snapshot
from areal_actors.errors import CheckpointError, ModelError
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.training.publication import DiskPublisher, MemoryPublisher


@define
class Policy:
    """A model at a version."""

    model: torch.nn.Module
    version: int = 0

    def state_dict(self):
        return dict(self.model.state_dict())

    @contextmanager
    def gathered(self):
        yield self.state_dict()


def make_policy(make_model, kind: str = "llama", *, seed: int = 1, version: int = 1) -> Policy:
    """Every weight is another one than that of the engines, which have seed 0."""
    return Policy(make_model(kind, seed=seed), version)


async def logprobs_after(snapshot: Snapshot, model: torch.nn.Module, dtype: str) -> list[float]:
    """What an engine with other weights reports once it has loaded ``snapshot``."""
    config = TorchEngineConfig(dtype=dtype, device="cpu", max_length=64)
    async with TorchEngine.open(config, model=model) as engine:
        await engine.load(snapshot)
        asked = EngineRequest(id="r", prompt=[1, 2, 3], sampling=Sampling(max_new_tokens=8), key=SampleKey(seed=1))
        async with engine.generate(asked) as chunks:
            got = [chunk async for chunk in chunks]
    assert {snapshot.version} == {chunk.version for chunk in got}
    return [float(value) for chunk in got for value in chunk.logprobs]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_memory_and_disk_publish_the_same_weights(tmp_path: Path, make_model, kind: str, dtype: str):
    """To the last bit, in the engine's dtype, whether weights are tied or not."""
    policy = make_policy(make_model, kind)
    disk = DiskPublisher(root=tmp_path, dtype=getattr(torch, dtype)).publish(policy)
    lent = MemoryPublisher().publish(policy)

    assert await logprobs_after(lent, make_model(kind, seed=0), dtype) == await logprobs_after(
        disk, make_model(kind, seed=0), dtype
    )


def test_memory_publisher_shares_the_weights():
    """Nothing is copied."""
    model = torch.nn.Linear(2, 2)
    snapshot = MemoryPublisher().publish(Policy(model, 3))

    assert (3, None) == (snapshot.version, snapshot.path)
    assert snapshot.state is not None
    assert model.weight.data_ptr() == snapshot.state["weight"].data_ptr()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral", "qwen3_moe", "olmoe"])
def test_an_engine_can_be_started_from_what_was_published(tmp_path: Path, make_model, kind: str):
    """It is a model's directory, in the dtype that it says."""
    policy = make_policy(make_model, kind)
    snapshot = DiskPublisher(root=tmp_path, dtype=torch.bfloat16).publish(policy)
    assert snapshot.path is not None
    loaded = AutoModelForCausalLM.from_pretrained(snapshot.path, dtype="auto")

    assert loaded.dtype is torch.bfloat16
    assert "bfloat16" == json.loads((snapshot.path / "config.json").read_text())["dtype"]
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), loaded.get_parameter(name))


def test_the_last_versions_are_kept(tmp_path: Path, make_model):
    """As many as are wanted; what a run wrote before it was resumed from an older step is not among them."""
    policy = make_policy(make_model)
    publisher = DiskPublisher(root=tmp_path, num_kept=2)
    (tmp_path / "version-00000009").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / ".version-00000002.partial").mkdir()
    for version in (1, 2, 3):
        policy.version = version
        publisher.publish(policy)

    assert ["notes", "version-00000002", "version-00000003"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_version_may_be_published_again(tmp_path: Path, make_model):
    """The weights are the new ones."""
    policy, publisher = make_policy(make_model), DiskPublisher(root=tmp_path)
    publisher.publish(policy)
    snapshot = publisher.publish(make_policy(make_model, seed=2))
    assert snapshot.path is not None
    loaded = AutoModelForCausalLM.from_pretrained(snapshot.path)

    assert torch.equal(make_model(seed=2).get_input_embeddings().weight, loaded.get_input_embeddings().weight)


def test_a_disk_that_refuses_is_named(tmp_path: Path, make_model):
    """And what was published before is still there."""
    policy, publisher = make_policy(make_model), DiskPublisher(root=tmp_path)
    former = publisher.publish(policy)
    policy.version = 2
    (tmp_path / ".version-00000002.partial").write_text("in the way, and no directory")
    with pytest.raises(CheckpointError, match="version-00000002 could not be written"):
        publisher.publish(policy)

    assert former.path is not None
    assert (former.path / "model.safetensors").is_file()


@pytest.mark.anyio
async def test_a_version_that_was_removed_meanwhile_is_refused(tmp_path: Path, make_model):
    """By name, and the engine keeps its weights; the next publication comes."""
    gone = Snapshot(version=4, path=tmp_path / "version-00000004")
    with pytest.raises(ModelError, match="version-00000004"):
        await logprobs_after(gone, make_model(), "float32")
