"""Servers that are started here: kept running, ended with the block, and named with their last words when they die."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.generation.servers.server_stack import open_replicated

from areal_actors.domain import Snapshot
from areal_actors.errors import EngineError
from areal_actors.generation.servers.config import Backend, ServerConfig
from areal_actors.generation.servers.launching import (
    count_devices,
    find_kind,
    format_command,
    launch_servers,
    split_devices,
)
from areal_actors.generation.servers.sglang import SGLangDialect
from areal_actors.models.built_in import create_tiny

KIND = find_kind(Backend.SGLANG)


def test_command_starts_module_of_the_server_or_users_program() -> None:
    """In a Python of the user's choice, with what they add."""
    plain = format_command(KIND, ServerConfig(python="/p", arguments=("--x",)), model=Path("/m"), port=5)
    own = format_command(KIND, ServerConfig(command=("/p", "start.py")), model=Path("/m"), port=5)
    place = ["--model-path", "/m", "--host", "127.0.0.1", "--port", "5"]

    assert plain == ["/p", "-m", "sglang.launch_server", "--incremental-streaming-output", *place, "--x"]
    assert own == ["/p", "start.py", *place]


@pytest.mark.anyio
async def test_server_that_dies_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    """The time limit for a start is not waited for."""
    model = create_tiny(tmp_path / "models")
    config = ServerConfig(command=("/bin/sh", "-c", "echo no such device; exit 3"), health_interval_seconds=0.05)
    with pytest.raises(EngineError, match=r"(?s)has ended before it was ready.*status 3.*no such device"):
        async with (
            launch_servers(KIND, config, model=model, logs=tmp_path / "logs") as launched,
            open_replicated(
                SGLangDialect(),
                config,
                urls=launched.urls,
                model=model,
                snapshot=Snapshot(version=0, path=model),
                publish_directory=tmp_path / "published",
                processes=launched,
            ),
        ):
            pass

    assert "no such device" in (tmp_path / "logs" / "server-0.log").read_text()


@pytest.mark.anyio
async def test_server_ends_with_the_block(tmp_path: Path) -> None:
    """And is given a process of its own group until then."""
    config = ServerConfig(command=("/bin/sh", "-c", "sleep 600"))
    async with launch_servers(KIND, config, model=tmp_path, logs=tmp_path) as launched:
        (process,) = launched.processes.values()
        assert os.getpgid(process) == process
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.anyio
async def test_port_that_is_taken_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Otherwise another program there could be mistaken for our server, and get our weights."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        config = ServerConfig(command=("/bin/true",), port=port)
        with pytest.raises(EngineError, match=rf"port {port} .*in use.*set another port"):
            async with launch_servers(KIND, config, model=tmp_path, logs=tmp_path):
                pass


@pytest.mark.anyio
async def test_port_beyond_the_last_is_named(tmp_path: Path) -> None:
    """The second of two servers that begin at the last port has none."""
    config = ServerConfig(command=("/bin/true",), port=65535, num_servers=2)
    with pytest.raises(EngineError, match="port 65536"):
        async with launch_servers(KIND, config, model=tmp_path, logs=tmp_path):
            pass


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.text("abc0123456789-", min_size=1), max_size=40, unique=True))
def test_every_server_has_its_own_gpus(num_servers: int, num_each: int, visible: list[str]) -> None:
    """As many as it needs, none of them twice, in their order; too few are named before anything starts."""
    if num_servers * num_each > len(visible):
        with pytest.raises(EngineError, match=f"{num_servers} servers with {num_each} GPUs each need"):
            split_devices(visible, num_servers=num_servers, num_each=num_each)
        return
    slices = split_devices(visible, num_servers=num_servers, num_each=num_each)

    assert [num_each] * num_servers == [len(one) for one in slices]
    assert visible[: num_servers * num_each] == [name for one in slices for name in one]


@pytest.mark.parametrize(
    ("arguments", "num"),
    [
        ((), 1),
        (("--tp", "4"), 4),
        (("--tensor-parallel-size=2", "--pipeline-parallel-size", "3"), 6),
        (("--tp-size", "2", "--dp-size", "2"), 4),
        (("--tp-size", "4", "--dp", "4", "--enable-dp-attention"), 4),
        (("-tp", "2", "--mem-fraction-static", ".5"), 2),
        (("--tp",), 1),
        (("--tp", "many"), 1),
    ],
)
def test_gpus_of_a_server_follow_from_its_arguments(arguments: tuple[str, ...], num: int) -> None:
    """Tensor, pipeline and data parallelism multiply, in the spellings of SGLang and vLLM."""
    assert num == count_devices(arguments)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("outer", "settings", "expected"),
    [
        ("4,5,6,7", {"arguments": ("--tp", "2")}, ["4,5", "6,7"]),
        ("0,1", {"environment": {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}}, ["GPU-a", "GPU-b"]),
        ("3,3", {}, ["3", "3"]),
        ("", {}, ["", ""]),
    ],
)
async def test_servers_see_their_own_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: str, settings: dict[str, Any], expected: list[str]
) -> None:
    """Real processes: of those that this one may use, or that the configuration names."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    write = 'echo "$CUDA_VISIBLE_DEVICES" > "$0/gpus-$6.part" && mv "$0/gpus-$6.part" "$0/gpus-$6"; exec sleep 600'
    config = ServerConfig(num_servers=2, command=("/bin/sh", "-c", write, str(tmp_path)), **settings)
    with anyio.fail_after(20):
        async with launch_servers(KIND, config, model=tmp_path, logs=tmp_path) as launched:
            ports = [url.rpartition(":")[2] for url in launched.urls]
            paths = [anyio.Path(tmp_path / f"gpus-{port}") for port in ports]
            while not all([await path.exists() for path in paths]):
                await anyio.lowlevel.checkpoint()
            assert expected == [(await path.read_text()).strip() for path in paths]


@pytest.mark.anyio
async def test_too_few_gpus_are_named_before_anything_starts(tmp_path: Path) -> None:
    """With how to share one."""
    environment = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    config = ServerConfig(num_servers=2, command=("/bin/false",), arguments=("--tp=2",), environment=environment)
    with pytest.raises(EngineError, match=r"need 4, and 3 can be used: 0, 1, 2.*as in 0,0"):
        async with launch_servers(KIND, config, model=tmp_path, logs=tmp_path):
            pass
