"""The sandbox ``none``, and backends that are named without their plug-in."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from areal_actors.errors import SandboxError
from areal_actors.sandbox import BoxRequest, Sandbox, SandboxConfig, create_sandbox
from areal_actors_testing.sandbox_contract import SANDBOX_CHECKS, Check

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def open_box(*, proxy_url: str | None = None, **changes: Any) -> AsyncIterator[Sandbox]:
    """Open a box without isolation, with changed settings."""
    config = evolve(SandboxConfig(), **changes)
    async with create_sandbox("none").open(BoxRequest(config=config, proxy_url=proxy_url)) as box:
        yield box


@pytest.mark.parametrize("check", SANDBOX_CHECKS, ids=lambda check: check.__name__)
async def test_plain_box_keeps_the_contract(check: Check):
    """The contract of every backend, without the checks of isolation."""
    await check(open_box)


async def test_plain_box_copies_no_devices_and_no_links_out_of_the_tree(tmp_path: Path):
    """Pipes, absolute links, links that lead out, and what is too deep are left out by name; modes lose setuid."""
    tree, deep = tmp_path / "tree", tmp_path / "tree" / "deep"
    deep.mkdir(parents=True)
    (tree / "run").write_bytes(b"#!")
    (tree / "run").chmod(0o4755)
    (tree / "link").symlink_to("run")
    (tree / "out").symlink_to("../secret")
    (deep / "indirect").symlink_to("../out")
    (tree / "absolute").symlink_to(tree / "run")
    os.mkfifo(tree / "pipe")
    for _ in range(110):
        deep = deep / "d"
    deep.mkdir(parents=True)
    async with open_box() as box:
        left_out = await box.copy_out(str(tree), tmp_path / "target")

    found = {path.name for path in (tmp_path / "target").rglob("*")}
    assert found == {"run", "link", "deep", "d"}
    assert {name.rpartition("/")[2] for name in left_out} == {"out", "indirect", "absolute", "pipe", "d"}
    assert (tmp_path / "target" / "run").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "target" / "link").readlink() == Path("run")


async def test_plain_box_refuses_copies_larger_than_the_disk_limit(tmp_path: Path):
    """An empty file counts for 4 KiB. The limit is twice ``disk_mib``, as the working directory and /tmp have."""
    for number in range(600):
        (tmp_path / str(number)).touch()
    config = SandboxConfig()
    object.__setattr__(config, "disk_mib", 1)  # no setting of a box without isolation
    async with create_sandbox("none").open(BoxRequest(config=config)) as box:
        with pytest.raises(SandboxError, match="more than 2 MiB"):
            await box.copy_out(str(tmp_path), tmp_path.with_name("target"))


def test_sandbox_backend_that_is_unknown_is_refused():
    """The error names it; that of a known plug-in has the line that installs it (``tests/lib/test_plugins.py``)."""
    with pytest.raises(ValueError, match=r"'backend' must be in .*'none'.*gvisor"):
        SandboxConfig(backend="gvisor")
