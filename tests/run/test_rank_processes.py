"""Ranks of a gang as child processes that do not come up, or have much to say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from areal_actors.dashboard import RunDirectory
from areal_actors.errors import GangError
from areal_actors.run.job import Job
from areal_actors.run.ranks import open_ranks

pytestmark = pytest.mark.anyio

RANK = """
import json, os, sys
import anyio
from attrs import frozen
from areal_actors.kernel import Actor, ActorSystem, Message
from areal_actors.kernel.remote import connect

class Ranks: pass

@frozen(kw_only=True)
class Nothing(Message[Ranks, None]): pass

class Rank(Actor[Ranks]):
    @Nothing.handler
    async def nothing(self, message: Nothing) -> None: pass

order = json.loads(sys.stdin.readline())
mode = sys.argv[1] if order["name"] == "rank-1" else sys.argv[2]

async def main():
    async with ActorSystem.open() as system:
        rank = await system.spawn(Rank())
        secret = bytes.fromhex(order["secret"])
        async with connect(order["address"], secret=secret, node=order["name"], expose={"rank": rank}) as peer:
            if mode == "dies":
                os.write(2, b"out of memory, or so\\n")
                os._exit(3)
            if mode == "talks":
                print("much to say " * 100_000, flush=True)
                (open(sys.argv[3], "w")).close()
            await peer.wait_closed()

if mode == "waits":
    sys.stdin.read()
anyio.run(main)
"""


def job_in(path: Path, num_processes: int) -> Job:
    """As much of a job as its ranks are told."""
    gang = SimpleNamespace(num_processes=num_processes)
    config = SimpleNamespace(trainer=SimpleNamespace(gang=gang))
    return cast("Job", SimpleNamespace(config=config, directory=RunDirectory(path=path), counters=None))


def command(*modes: Any) -> list[str]:
    return [sys.executable, "-c", RANK, *map(str, modes)]


async def test_rank_that_dies_during_start_is_reported(tmp_path):
    """It had reported ready; waiting for the other ranks must end, too."""
    with anyio.fail_after(60), pytest.raises((ExceptionGroup, GangError)) as caught:
        async with open_ranks(job_in(tmp_path, 3), command=command("dies", "waits")):
            pass

    assert "rank-1 of the training gang" in str(leaf(caught.value))
    assert "exited with status 3" in str(leaf(caught.value))
    assert "out of memory, or so" in str(leaf(caught.value))


async def test_rank_output_does_not_block(tmp_path):
    """What libraries print on standard output is read, and kept in the log; a full pipe blocks nothing."""
    said = tmp_path / "said"
    with anyio.fail_after(60):
        async with open_ranks(job_in(tmp_path, 2), command=command("talks", "", said)) as members:
            while not said.exists():
                await anyio.to_thread.run_sync(lambda: None)

    assert 1 == len(members.ranks)
    assert "much to say" in (tmp_path / "logs" / "rank-1.log").read_text()


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
