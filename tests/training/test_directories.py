"""Files of tensors that the safetensors library reads back exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from areal_actors.training.directories import write_tensors

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
names = st.text(min_size=1, max_size=9).filter(lambda name: name != "__metadata__" and name.isprintable())


@given(contents=st.dictionaries(names, st.tuples(shapes, st.sampled_from([torch.float32, torch.int64, torch.uint8]))))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_written_tensors_are_read_back(tmp_path, contents):
    """Names, shapes (scalars and empty ones, too), types and values come back."""
    tensors = {name: (torch.rand(shape) * 99).to(dtype) for name, (shape, dtype) in contents.items()}

    write_tensors(tmp_path / "file.safetensors", tensors)

    found = load_file(tmp_path / "file.safetensors")
    assert tensors.keys() == found.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype is found[name].dtype
        assert torch.equal(tensor, found[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.bool])
def test_every_type_of_number(tmp_path, dtype):
    """Views that are not contiguous are written in their order."""
    tensor = (torch.rand(4, 3) * 2).to(dtype).T

    write_tensors(tmp_path / "file.safetensors", {"t": tensor})

    assert torch.equal(tensor, load_file(tmp_path / "file.safetensors")["t"])
