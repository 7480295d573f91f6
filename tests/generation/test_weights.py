"""Loading weights: all or nothing."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from areal_actors.domain import Snapshot
from areal_actors.errors import ModelError
from areal_actors.generation.torch.forward import load_snapshot

ALIASES = {"head": "embed"}


@pytest.fixture
def parameters():
    """Two parameters of zeros, in bfloat16."""
    return {"embed": torch.zeros(3, 2, dtype=torch.bfloat16), "norm": torch.zeros(2, dtype=torch.bfloat16)}


def test_weights_are_cast(parameters):
    """Float32 weights arrive in the engine's dtype, in place; what is tied may be there or not."""
    embed = parameters["embed"]
    load_snapshot(Snapshot(version=1, state={"embed": torch.ones(3, 2), "norm": torch.ones(2)}), parameters, ALIASES)
    assert embed is parameters["embed"]
    assert embed.sum() == 6
    state = {"embed": torch.ones(3, 2), "norm": torch.ones(2), "head": torch.ones(3, 2)}
    load_snapshot(Snapshot(version=1, state=state), parameters, ALIASES)


def test_buffers_are_loaded_if_a_snapshot_has_them(parameters):
    """Files of a model hold them, and a trainer does not publish them."""
    buffers = {"table": torch.zeros(2, dtype=torch.int64)}
    state = {"embed": torch.ones(3, 2), "norm": torch.ones(2)}
    load_snapshot(Snapshot(version=1, state=state), parameters, ALIASES, buffers)
    assert not buffers["table"].any()
    load_snapshot(Snapshot(version=2, state=state | {"table": torch.tensor([1, 2])}), parameters, ALIASES, buffers)
    assert [1, 2] == buffers["table"].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": None}, "norm is missing"),
        ({"extra": torch.ones(2)}, "extra is unknown"),
        ({"norm": torch.ones(3)}, r"norm is \(3,\), not \(2,\)"),
        ({"head": torch.ones(2, 2)}, "head is"),
        ({"head": torch.zeros(3, 2)}, "head is not embed, to which the engine's model ties it"),
        ({"norm": torch.ones(2, dtype=torch.int64)}, "not a floating-point tensor"),
        ({"norm": "weights"}, "not a floating-point tensor"),
    ],
)
def test_snapshot_that_does_not_fit_changes_nothing(parameters, change, message):
    """The error names the parameter, and no parameter has changed."""
    state = {"embed": torch.ones(3, 2), "norm": torch.ones(2)} | change
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        load_snapshot(Snapshot(version=1, state=state), parameters, ALIASES)

    assert all(not p.any() for p in parameters.values())


def test_directory_of_shards_is_read(parameters, tmp_path):
    """All safetensors files of the directory together are the weights."""
    save_file({"embed": torch.ones(3, 2)}, tmp_path / "model-1.safetensors")
    save_file({"norm": torch.ones(2)}, tmp_path / "model-2.safetensors")
    load_snapshot(Snapshot(version=1, path=tmp_path), parameters, ALIASES)

    assert all(p.all() for p in parameters.values())


def test_broken_file_changes_nothing(parameters, tmp_path):
    """Half a file, no file, or no source at all: a clear error, the old weights stay."""
    for path in (tmp_path / "nowhere", tmp_path, None):
        with pytest.raises(ModelError):
            load_snapshot(Snapshot(version=1, path=path), parameters, ALIASES)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_snapshot(Snapshot(version=1, path=tmp_path), parameters, ALIASES)

    assert all(not p.any() for p in parameters.values())
