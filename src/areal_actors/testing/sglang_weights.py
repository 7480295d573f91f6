"""How the small SGLang server receives weights in a group: as a real one does, with the ways in which that goes wrong.

It joins by the means of ``torch.distributed`` that servers use, so that what meets it here meets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any

import anyio
from anyio import to_thread
from attrs import define, field

from areal_actors.engines.base import Snapshot

__all__ = ["ReceivedWeights", "UpdateFault", "join_group", "leave_group", "receive_tensors"]

_SECONDS = 20.0
"""After which a wait in a group fails; real servers wait for half an hour."""


class UpdateFault(StrEnum):
    """What goes wrong with one update in a group."""

    REFUSED_BEGIN = "refused_begin"
    """It may not begin; tried again, that is another update."""
    LEFT_OPEN = "left_open"
    """Somebody has begun before, and was killed."""
    REFUSED = "refused"
    """What is to be received is refused, before anything is."""
    HALF = "half"
    """Half of a bucket is received, and loading that fails."""
    SILENCE = "silence"
    """Nothing is received, and nothing said, until the group is left."""
    DEATH = "death"
    """The server dies with half of a bucket received."""


@define(eq=False)
class ReceivedWeights:
    """The groups of one life of a server, and what it has received since the update began."""

    has_died: bool = False
    fault: UpdateFault | None = None
    _is_open: bool = False
    _groups: dict[str, Any] = field(factory=dict)
    _left: anyio.Event = field(factory=anyio.Event)
    _state: dict[str, Any] = field(factory=dict)

    async def join(self, body: Mapping[str, Any]) -> str | None:
        """Meet the others; returns why not."""
        try:
            self._groups[body["group_name"]] = await to_thread.run_sync(join_group, body, abandon_on_cancel=True)
        except (RuntimeError, ValueError) as error:
            return f"Failed to initialize custom process group: {error}."
        return None

    async def leave(self, name: str) -> str | None:
        """Leave a group; what waits in it fails."""
        group = self._groups.pop(name, None)
        self._left.set()
        if group is None:
            return "The group to be destroyed does not exist."
        await to_thread.run_sync(leave_group, group)
        return None

    def begin(self, fault: UpdateFault | None) -> str | None:
        """Begin an update, to which ``fault`` happens."""
        self.fault, self._left = fault, anyio.Event()
        is_open = self._is_open or fault is UpdateFault.LEFT_OPEN
        self._is_open = True
        if is_open or fault is UpdateFault.REFUSED_BEGIN:
            return "a weight-update session is already open; call end_weight_update() first"
        self._state = {}
        return None

    async def receive(self, body: Mapping[str, Any]) -> str | None:
        """Receive a bucket; returns why not."""
        group = self._groups.get(body["group_name"])
        if not self._is_open or group is None or self.fault is UpdateFault.REFUSED:
            return "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        if self.fault is UpdateFault.SILENCE:
            await self._left.wait()
            return "Failed to receive weights: the group is gone"
        is_half = self.fault in (UpdateFault.HALF, UpdateFault.DEATH)
        try:
            found = await to_thread.run_sync(receive_tensors, group, body, is_half, abandon_on_cancel=True)
        except RuntimeError as error:
            return f"Failed to receive weights: {error}"
        self._state |= found
        if self.fault is UpdateFault.DEATH:
            self.has_died = True
        return "Please discard the whole weights." if is_half else None

    def snapshot(self, version: int) -> Snapshot:
        """What was received."""
        return Snapshot(version=version, state=self._state)

    def end(self) -> str | None:
        """End the update."""
        if not self._is_open:
            return "no weight-update session is open; call begin_weight_update() first"
        self._is_open = False
        return None

    def die(self) -> None:
        """Be gone: whoever is in a group with it loses it."""
        self.has_died = True
        self._left.set()
        while self._groups:
            leave_group(self._groups.popitem()[1])


def join_group(body: Mapping[str, Any]) -> Any:
    """What servers do with the address that they are given. Raises ``RuntimeError`` if nobody is there."""
    from torch.distributed import Backend, PrefixStore, distributed_c10d, rendezvous  # type: ignore[attr-defined]

    timeout, size = timedelta(seconds=_SECONDS), body["world_size"]
    address = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, size = next(rendezvous(address, body["rank_offset"], size, timeout=timeout))
    store.set_timeout(timeout)
    name = body["group_name"]
    store = PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(  # noqa: SLF001 - there is no other way, for them either
        size, rank, [], Backend(body["backend"]), store, group_name=name, timeout=timeout
    )
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}  # noqa: SLF001
    return group


def receive_tensors(group: Any, body: Mapping[str, Any], is_half: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
    """The tensors that ``body`` describes, or the first half of them. Raises ``RuntimeError`` if they do not come."""
    import torch

    described = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
    state = {}
    for name, dtype, shape in described[: len(described) // 2] if is_half else described:
        state[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        torch.distributed.broadcast(state[name], src=0, group=group)
    return state


def leave_group(group: Any) -> None:
    """Leave a group."""
    import torch

    torch.distributed.destroy_process_group(group)
