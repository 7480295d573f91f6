"""Settings of a sandbox: which one, what it may use, and what it sees."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from attrs import field, fields, frozen
from attrs.validators import deep_iterable, ge, gt, matches_re, optional

__all__ = ["Network", "SandboxConfig", "SandboxKind"]


class SandboxKind(StrEnum):
    """The program that isolates the processes of an episode."""

    NONE = "none"
    """No isolation: child processes of the run, in a temporary directory."""
    BUBBLEWRAP = "bubblewrap"
    """Namespaces of an unprivileged user, made by bwrap."""
    DOCKER = "docker"
    PODMAN = "podman"
    APPTAINER = "apptainer"


class Network(StrEnum):
    """The network that the processes in a sandbox can reach."""

    PROXY = "proxy"
    """The model's address, and nothing else."""
    NONE = "none"
    """Nothing."""
    HOST = "host"
    """Whatever the host can reach."""


@frozen(kw_only=True)
class SandboxConfig:
    """The sandbox of agents that are commands, its limits, and what they see inside; or only the name of its backend.

    A limit that is exceeded ends the sandbox, and with it the episode.
    """

    short_form: ClassVar[str] = "backend"

    backend: SandboxKind = SandboxKind.NONE
    """The program that isolates: bubblewrap, docker, podman, apptainer, or none."""
    image: str | None = None
    """The image of docker or podman, or the file or directory of apptainer. It needs python3."""
    network: Network = Network.PROXY
    """What can be reached: proxy is the model's address and nothing else; none is nothing; host is all that the host
    can."""
    timeout_seconds: float | None = field(default=None, validator=optional(gt(0)))
    """How long a command may run in it; by default as long as the episode."""
    cpus: int | None = field(default=None, validator=optional(ge(1)))
    """Processor cores; by default all."""
    cpu_seconds: float | None = field(default=None, validator=optional(gt(0)))
    """Processor time of all its processes together; by default not limited."""
    memory_mib: int = field(default=2048, validator=ge(16))
    """Memory of all its processes together."""
    max_processes: int = field(default=256, validator=ge(4))
    """Processes and threads at the same time."""
    disk_mib: int = field(default=1024, validator=ge(1))
    """Size of the working directory, which is in memory; /tmp may take as much again."""
    readable: tuple[Path, ...] = ()
    """Files and directories of the host that can be read inside, in addition to its programs and libraries."""
    writable: tuple[Path, ...] = ()
    """Directories of the host that can be written inside. They are shared by all episodes, and outlive them."""
    environment: tuple[str, ...] = field(default=(), validator=deep_iterable(matches_re(r"[A-Za-z_][A-Za-z0-9_]*")))
    """Names of variables that are passed on from the run's environment, of which only PATH, LANG and the like are
    passed otherwise."""

    def __attrs_post_init__(self) -> None:
        """Raise ``ValueError`` for limits that nothing would enforce, and for a container without an image."""
        is_container = self.backend not in (SandboxKind.NONE, SandboxKind.BUBBLEWRAP)
        if is_container and self.image is None:
            raise ValueError(f"the sandbox {self.backend} needs an image")
        if self.image is not None and not is_container:
            raise ValueError(f"an image is for docker, podman and apptainer, and the backend is {self.backend}")
        changed = [part.name for part in fields(SandboxConfig) if getattr(self, part.name) != part.default]
        inert = sorted(set(changed) - {"backend", "timeout_seconds", "environment"})
        if self.backend is SandboxKind.NONE and inert:
            raise ValueError(f"without a sandbox, nothing enforces {', '.join(inert)}; name a backend: bubblewrap")
