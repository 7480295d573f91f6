"""The bootstrap message, and the check that a process makes before it becomes the worker."""

from __future__ import annotations

import json
import os
import sys

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import ConfigError, SchedulerError
from areal_actors.kernel.remote import listen
from areal_actors.schedulers.base import NOT_BEGUN
from areal_actors.schedulers.bootstrap import Bootstrap
from areal_actors.schedulers.preflight import check

SECRET = b"known only to both sides of a test"


def bootstrap(directory, *, address="tcp://127.0.0.1:9", secret=SECRET, mode=0o600, words=None):
    """The file that a worker is told of."""
    for name in ("exit", "bootstrap"):
        (directory / name).mkdir(exist_ok=True)
    path = directory / "bootstrap" / "x.json"
    told = {"name": "x", "life": 0, "address": address, "secret": secret.hex()} if words is None else words
    path.write_text(json.dumps(told))
    path.chmod(mode)
    return str(path)


@given(life=st.integers(0, 5000), num_restarts=st.integers(0, 9))
def test_bootstrap_round_trips_and_counts_restarts_as_incarnations(life, num_restarts):
    """A worker that the cluster has started again is another incarnation."""
    told = Bootstrap(name="x", life=life, address="a", secret=b"s")

    assert told == Bootstrap.from_line(told.to_line())
    assert life + num_restarts == Bootstrap.from_line(told.to_line(), num_restarts=num_restarts).life


@pytest.mark.anyio
async def test_preflight_passes_if_controller_answers(tmp_path):
    """The secret is known, the directory can be written, and nothing is left in it."""
    async with listen("tcp://127.0.0.1:0", secret=SECRET) as listener:
        await check(bootstrap(tmp_path, address=listener.address), 5)

    assert list((tmp_path / "exit").iterdir()) == []


@pytest.mark.anyio
async def test_preflight_names_what_is_wrong(tmp_path):
    """No controller, another secret, no file, a readable secret, another message, a missing directory."""
    async with listen("tcp://127.0.0.1:0", secret=b"another secret, just as long...") as listener:
        with pytest.raises(SchedulerError, match=r"cannot be reached.*does not know the secret"):
            await check(bootstrap(tmp_path, address=listener.address), 0.2)
    with pytest.raises(SchedulerError, match=r"cannot be reached.*tcp://127.0.0.1:9"):
        await check(bootstrap(tmp_path), 0.2)
    with pytest.raises(ConfigError, match="others can read"):
        await check(bootstrap(tmp_path, mode=0o644), 0.2)
    with pytest.raises(ConfigError, match="file system"):
        await check(str(tmp_path / "nothing"), 0.2)
    path = bootstrap(tmp_path, words=[])
    with pytest.raises(ConfigError, match="workers are started by the scheduler"):
        await check(path, 0.2)
    path = bootstrap(tmp_path)
    (tmp_path / "exit").rmdir()
    with pytest.raises(SchedulerError, match="cannot be written"):
        await check(path, 0.2)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_preflight_process_becomes_worker_or_exits_with_reason(tmp_path):
    """As a job starts it."""
    environment = {**os.environ, "AREAL_BOOTSTRAP": bootstrap(tmp_path)}
    command = [sys.executable, "-m", "areal_actors.schedulers.preflight", "0.2", "platform"]
    refused = await anyio.run_process(command, env=environment, check=False)
    async with listen("tcp://127.0.0.1:0", secret=SECRET) as listener:
        environment["AREAL_BOOTSTRAP"] = bootstrap(tmp_path, address=listener.address)
        became = await anyio.run_process(command, env=environment, check=False)

    assert refused.returncode == NOT_BEGUN
    assert refused.stderr.decode().startswith("preflight: the controller cannot be reached")
    assert became.returncode == 0, became.stderr
    assert b"Linux" in became.stdout or became.stdout
