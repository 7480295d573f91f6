"""A group for broadcasts: tensors arrive, absent and lost ranks are noticed, and no wait is endless."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from areal_actors.errors import EngineError
from areal_actors.training import weight_store
from areal_actors.training.weight_store import BroadcastGroup, address_towards
from areal_actors_testing.sglang_server import join_group, leave_group, receive_tensors

NUM_NUMBERS = 5_000_000
"""More than what a connection takes without anybody who reads."""

BODY = {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[3], [2, 2]]}
PEER = f"""
import sys
from areal_actors_testing.sglang_server import join_group, receive_tensors

rank, size = int(sys.argv[1]), int(sys.argv[2])
for port in sys.argv[3:]:
    place = {{"master_address": "127.0.0.1", "master_port": int(port), "group_name": "g" + port, "backend": "gloo"}}
    group = join_group(place | {{"world_size": size, "rank_offset": rank}})
if size > 2:
    print([tensor.tolist() for tensor in receive_tensors(group, {BODY}).values()], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def group() -> Iterator[BroadcastGroup]:
    opened = open_group()
    yield opened
    opened.cancel()


def open_group(*, num_ranks: int = 1, seconds: float = 20.0) -> BroadcastGroup:
    group = BroadcastGroup.open(
        "g",
        machines=["localhost"],
        device="cpu",
        source=torch.device("cpu"),
        num_ranks=num_ranks,
        timeout_seconds=seconds,
    )
    group.name = f"g{group.port}"
    return group


def start_peer(*groups: BroadcastGroup, rank: int = 1) -> subprocess.Popen[str]:
    """A process that joins groups of the same size, one after another, and is silent in those of two."""
    numbers = [rank, groups[0].num_ranks + 1, *(group.port for group in groups)]
    command = [sys.executable, "-c", PEER, *map(str, numbers)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(peer: subprocess.Popen[str]) -> None:
    peer.kill()
    peer.communicate()


def run_aside(action: Callable[[], Any]) -> Future[Any]:
    with_one = ThreadPoolExecutor(1)
    future = with_one.submit(action)
    with_one.shutdown(wait=False)
    return future


def test_all_ranks_of_a_server_receive_what_is_sent() -> None:
    """One here and one in another process, two dtypes; the group is not torch's default group."""
    group = open_group(num_ranks=2)
    peer = start_peer(group, rank=2)
    place = {"master_address": group.host, "master_port": group.port, "group_name": group.name, "backend": "gloo"}
    joining = run_aside(lambda: join_group(place | {"world_size": 3, "rank_offset": 1}))
    try:
        group.join()
        joined = joining.result(10)
        receiving = run_aside(lambda: receive_tensors(joined, BODY))
        group.send([torch.arange(3.0), torch.ones(2, 2, dtype=torch.bfloat16)])
        group.flush()
        received = [tensor.tolist() for tensor in receiving.result(10).values()]
        leave_group(joined)

        assert not dist.is_initialized()
        assert received == [[0.0, 1.0, 2.0], [[1.0, 1.0], [1.0, 1.0]]]
        assert peer.stdout is not None
        assert peer.stdout.readline() == f"{received}\n"
    finally:
        group.close()
        end(peer)


def test_broadcast_group_gives_up_absent_ranks_in_time() -> None:
    """Who does not come is named with the place where they were expected; the group is of no more use."""
    group = open_group(seconds=0.05)
    with pytest.raises(EngineError, match=r"Not all of 1 processes have joined g\d+ at 127.0.0.1:\d+ within 0.05 s"):
        group.join()
    with pytest.raises(EngineError, match="closed"):
        group.send([torch.zeros(1)])
    group.close()
    group.close()
    with pytest.raises(EngineError, match="closed"):
        group.join()


def test_broadcast_group_waits_can_be_cancelled(group: BroadcastGroup) -> None:
    """From any thread, at once."""
    waiting = run_aside(group.join)
    group.cancel()
    with pytest.raises(EngineError, match="closed"):
        waiting.result(10)


def test_broadcast_ends_when_a_rank_stalls_or_is_killed() -> None:
    """Who sends is woken. Leaving, which has to wait for the rank, holds the interpreter no more than a killed one."""
    left, lost = open_group(), open_group()
    peer = start_peer(left, lost)
    sending = []
    for group in (left, lost):
        group.join()
        sending.append(run_aside(lambda group=group: (group.send([torch.zeros(NUM_NUMBERS)]), group.flush())))
    while not (left._works and lost._works):
        threading.Event().wait(0.001)
    left.cancel()
    with pytest.raises(EngineError, match="closed"):
        sending[0].result(10)
    leaving = run_aside(left.close)
    assert not leaving.done()
    end(peer)
    with pytest.raises(EngineError, match="was lost"):
        sending[1].result(10)
    leaving.result(10)
    lost.close()


def test_a_host_is_found_by_the_address_that_leads_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this machine that is loopback, under any of its names; an unknown name is an error."""
    assert address_towards("localhost") == address_towards("127.0.0.1") == address_towards(socket.gethostname())
    assert address_towards("127.0.0.2") == "127.0.0.1"
    with pytest.raises(EngineError, match="no way to nowhere"):
        address_towards("nowhere.invalid")

    def refuse(*_: object) -> None:
        raise OSError("no more sockets")

    monkeypatch.setattr(weight_store, "open_store", refuse)
    with pytest.raises(EngineError, match="no more sockets"):
        open_group()
