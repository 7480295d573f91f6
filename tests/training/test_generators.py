"""The states of torch's generators, there and back."""

from __future__ import annotations

import pytest
import torch

from areal_actors.training.generators import generator_states, set_generator_states


def test_each_device_gets_its_own_state_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the eleventh, whose name comes before that of the third."""
    given = [torch.tensor([index], dtype=torch.uint8) for index in range(12)]
    taken: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: given)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(given))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", taken.extend)
    set_generator_states(generator_states())

    assert [int(state) for state in given] == [int(state) for state in taken]
