"""Save and restore the states of torch's random generators for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["generator_states", "set_generator_states"]


def generator_states() -> dict[str, Tensor]:
    """Return the state of each generator, by the name of its device."""
    states = {"cpu": torch.get_rng_state()}
    return states | {f"cuda{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Restore states returned by ``generator_states``; those of GPUs only if the number of GPUs is the same."""
    torch.set_rng_state(states["cpu"])
    devices = [states[name] for index in range(len(states)) if (name := f"cuda{index}") in states]
    if len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(devices)
