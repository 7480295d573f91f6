"""Weights that are moved by hand, as one would without this library: the baselines of ``updates``."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import define
from safetensors.torch import load_file, save_file

from areal_actors.domain import Ints

__all__ = ["ByHand", "Policy", "State", "measure_by_hand"]

State = dict[str, torch.Tensor]


@define
class Policy:
    """A model whose weights are others in each version, each tensor by one name."""

    model: Any
    version: int = 0

    def state_dict(self) -> State:
        """The weights; what is tied is left out."""
        distinct: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in self.model.state_dict().items():
            distinct.setdefault(tensor.data_ptr(), (name, tensor))
        return dict(distinct.values())

    def step(self) -> None:
        """What a trainer would do."""
        self.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.999)

    @property
    def num_bytes(self) -> int:
        """Of a version."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())


class ByHand(StrEnum):
    """How weights reach a second model, without this library."""

    COPIED = "copied by hand"
    SENT = "sent by hand"
    WRITTEN = "written by hand"
    SYNCED = "written and synced by hand"


def measure_by_hand(policy: Policy, other: Any, prompt_ids: Ints, rounds: int) -> Mapping[ByHand, list[float]]:
    """Seconds until a second model has the weights, and has said what comes behind the prompt."""
    prompt = torch.as_tensor(prompt_ids, dtype=torch.long)[None]
    times: dict[ByHand, list[float]] = {way: [] for way in ByHand}
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        ways: dict[ByHand, Callable[[State], State]] = {
            ByHand.COPIED: dict,
            ByHand.SENT: _send,
            ByHand.WRITTEN: partial(_write, Path(directory, "weights"), is_synced=False),
            ByHand.SYNCED: partial(_write, Path(directory, "weights"), is_synced=True),
        }
        other(prompt, logits_to_keep=1)
        for _ in range(rounds):
            policy.step()
            for way, move in ways.items():
                begun = time.perf_counter()
                other.load_state_dict(move(policy.state_dict()), strict=False)  # what is tied is not there
                other(prompt, logits_to_keep=1).logits[0, -1].argmax().item()
                times[way].append(time.perf_counter() - begun)
    return times


def _send(state: State) -> State:
    """What has arrived at the other end of a socket."""
    arrived = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as sender:
        sending = sender.submit(lambda: [near.sendall(_bytes_of(tensor)) for tensor in state.values()])
        for tensor in arrived.values():
            left = _bytes_of(tensor)
            while left:
                left = left[far.recv_into(left) :]
        sending.result()
    return arrived


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().numpy()).cast("B")


def _write(path: Path, state: State, *, is_synced: bool) -> State:
    """What has been written and read."""
    save_file(state, path)
    if is_synced:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return load_file(path)
