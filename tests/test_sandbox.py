"""The sandbox ``none``, and backends that are named without their plug-in."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

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
    """Pipes, absolute links and links that lead out are left out by name."""
    tree, deep = tmp_path / "tree", tmp_path / "tree" / "deep"
    deep.mkdir(parents=True)
    (tree / "run").write_bytes(b"#!")
    (tree / "run").chmod(0o755)
    (tree / "link").symlink_to("run")
    (tree / "out").symlink_to("../secret")
    (deep / "indirect").symlink_to("../out")
    (tree / "absolute").symlink_to(tree / "run")
    os.mkfifo(tree / "pipe")
    async with open_box() as box:
        left_out = await box.copy_out(str(tree), tmp_path / "target")

    assert {path.name for path in (tmp_path / "target").rglob("*")} == {"run", "link", "deep"}
    assert set(left_out) == {"out", "deep/indirect", "absolute", "pipe"}
    assert (tmp_path / "target" / "run").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "target" / "link").readlink() == Path("run")


def test_sandbox_backend_that_is_unknown_is_refused():
    """The error names it; that of a known plug-in has the line that installs it (``tests/lib/test_plugins.py``)."""
    with pytest.raises(ValueError, match=r"'backend' must be in .*'none'.*gvisor"):
        SandboxConfig(backend="gvisor")
