"""Command lines of containers; that they work is tested by the contract, where the program is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_actors.errors import SandboxError
from areal_actors.sandbox import SandboxConfig, create_sandbox

PRINT_ARGUMENTS = """#!/bin/sh
printf '%s\\n' "$@" > "$ARGUMENTS"
env | sort >> "$ARGUMENTS"
"""

REFUSE_CGROUPS = """#!/bin/sh
case "$*" in *--memory=*) echo "FATAL: while applying cgroups config: cannot use cgroups" >&2; exit 255;; esac
"""


def test_apptainer_is_called_as_its_manual_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All namespaces are new, nothing of the host but what the settings name is seen, and the limits are set."""
    program = tmp_path / "apptainer"
    program.write_text(PRINT_ARGUMENTS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("ARGUMENTS", str(tmp_path / "arguments"))
    monkeypatch.setenv("APPTAINER_BIND", "/scratch")  # set by the modules of many sites
    config = SandboxConfig(
        backend="apptainer",
        image="/images/a.sif",
        cpus=2,
        memory_mib=64,
        max_processes=9,
        readable=(tmp_path,),
    )

    found = create_sandbox("apptainer").check(config)

    called = (tmp_path / "arguments").read_text().splitlines()
    assert found == f"apptainer ({program}) with /images/a.sif"
    assert called[0] == "exec"
    assert {"--containall", "--no-init", "--no-privs", "--no-mount=sys,bind-paths", "--network=none"} < set(called)
    assert {"--pids-limit=10", "--memory=64m", "--memory-swap=64m", "--cpus=2", "--scratch=/workspace"} < set(called)
    assert {"--bind=/proc/sys:/proc/sys:ro", f"--bind={tmp_path}:{tmp_path}:ro"} < set(called)
    image = called.index("/images/a.sif")
    assert called[image : image + 5] == ["/images/a.sif", "python3", "-I", "-S", "-c"]
    assert all(word.startswith("-") for word in called[1:image])
    assert not any(line.startswith("APPTAINER_BIND=") for line in called)


def test_apptainer_without_cgroups_leaves_the_limits_to_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ordinary users of a cluster seldom have a session of systemd, which apptainer needs for them."""
    program = tmp_path / "apptainer"
    program.write_text(REFUSE_CGROUPS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    found = create_sandbox("apptainer").check(SandboxConfig(backend="apptainer", image="/b.sif"))

    assert found == f"apptainer ({program}) with /b.sif, without cgroups"


@pytest.mark.parametrize("kind", ["docker", "podman", "apptainer"])
def test_a_missing_program_names_its_install_line(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The error says what to install."""
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(SandboxError, match=rf"needs the program {kind}, .*(apt-get install|apptainer\.org)"):
        create_sandbox(kind).check(SandboxConfig(backend=kind, image="a"))
