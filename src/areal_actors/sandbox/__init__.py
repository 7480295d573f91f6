"""Sandboxes: boxes in which the commands of an episode run, with limits, and with only the model in reach."""

from __future__ import annotations

from pathlib import Path

from areal_actors.lib.scratch import scratch_directory
from areal_actors.sandbox.base import BoxRequest, Completed, Sandbox, SandboxBackend
from areal_actors.sandbox.config import Network, SandboxConfig, SandboxKind

__all__ = [
    "BoxRequest",
    "Completed",
    "Network",
    "Sandbox",
    "SandboxBackend",
    "SandboxConfig",
    "SandboxKind",
    "create_sandbox",
    "scratch_directory",
]


def create_sandbox(kind: SandboxKind, *, log: Path | None = None) -> SandboxBackend:
    """Return the backend of this kind. ``log`` is a file for what its program itself says."""
    if kind is SandboxKind.NONE:
        from areal_actors.sandbox.plain import PlainSandbox

        return PlainSandbox()
    if kind is SandboxKind.BUBBLEWRAP:
        from areal_actors.sandbox.bubblewrap import BubblewrapSandbox

        return BubblewrapSandbox(log=log)
    from areal_actors.sandbox.containers import ContainerSandbox

    return ContainerSandbox(kind=kind, log=log)
