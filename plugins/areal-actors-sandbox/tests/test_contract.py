"""The contract of sandboxes, for each backend that can run here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

import pytest
from attrs import evolve

from areal_actors.errors import SandboxError
from areal_actors.sandbox import BoxRequest, Network, Sandbox, SandboxConfig, create_sandbox
from areal_actors_testing.sandbox_contract import ISOLATION_CHECKS, SANDBOX_CHECKS, Check

pytestmark = pytest.mark.anyio

IMAGES = {
    "docker": os.environ.get("AREAL_SANDBOX_IMAGE"),
    "podman": os.environ.get("AREAL_SANDBOX_IMAGE"),
    "apptainer": os.environ.get("AREAL_SANDBOX_ROOT"),
}
"""An image, or the root of a file system, with python3 and a shell; ``nox -s containers`` creates both."""

KINDS = ("bubblewrap", *IMAGES)


def settings_of(kind: str) -> SandboxConfig:
    """The defaults, with an image where one is needed."""
    return SandboxConfig(backend=kind, image=IMAGES[kind] or "none") if kind in IMAGES else SandboxConfig(backend=kind)


@cache
def why_not(kind: str) -> str:
    """Why a backend cannot run here; empty if it can."""
    if kind in IMAGES and IMAGES[kind] is None and shutil.which(kind) is not None:
        return f"there is no image for {kind}: nox -s containers"
    try:
        create_sandbox(kind).check(settings_of(kind))
    except (SandboxError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


@asynccontextmanager
async def open_box(kind: str, *, proxy_url: str | None = None, **changes: Any) -> AsyncIterator[Sandbox]:
    """A box of this kind, with changed settings."""
    changes = {name: Network(value) if name == "network" else value for name, value in changes.items()}
    config = evolve(settings_of(kind), **changes)
    async with create_sandbox(kind).open(BoxRequest(config=config, proxy_url=proxy_url)) as box:
        yield box


@pytest.mark.parametrize("check", SANDBOX_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_sandbox_keeps_the_contract(kind: str, check: Check):
    """On both event loops."""
    if why_not(kind):
        pytest.skip(why_not(kind))

    await check(partial(open_box, kind))


@pytest.mark.parametrize("check", ISOLATION_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_sandbox_isolates(kind: str, check: Check):
    """On both event loops."""
    if why_not(kind):
        pytest.skip(why_not(kind))

    await check(partial(open_box, kind))
