"""Settings of inference servers: which there are, or how they are started. Loads neither HTTP nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from attrs import field, frozen
from attrs.validators import ge, gt, le

__all__ = ["Backend", "ServedEngine", "ServerConfig"]


class Backend(StrEnum):
    """What generates."""

    TORCH = "torch"
    """The embedded engine, in this process."""
    SGLANG = "sglang"
    VLLM = "vllm"


@frozen(kw_only=True)
class ServerConfig:
    """Servers that generate: those at ``urls``, or ``num_servers`` that are started here and end with the run."""

    urls: tuple[str, ...] = ()
    """Servers that run already, such as http://node1:30000; without any, they are started."""
    gateway_url: str | None = None
    """Where requests to generate go, if not to the servers themselves: a gateway in front of all of them."""
    api_key_file: Path | None = None
    """A file that holds the key of the servers at urls, and nothing else."""
    num_servers: int = field(default=1, validator=ge(1))
    """Servers to start, each with a copy of the model."""
    python: str = "python"
    """The Python that the server is installed for; never ours, its packages clash."""
    command: tuple[str, ...] = ()
    """Program and first arguments, in the place of python -m and the server's own module."""
    arguments: tuple[str, ...] = ()
    """More arguments of the server, after its model, host and port."""
    environment: Mapping[str, str] = field(factory=dict)
    """Variables beside those of this process; CUDA_VISIBLE_DEVICES, for one."""
    port: int = field(default=0, validator=[ge(0), le(65535)])
    """Port of the first server, the others take those after it; 0 takes any that are free."""
    start_timeout_seconds: float = field(default=900.0, validator=gt(0))
    """How long a server may take until it answers."""
    publish_directory: Path | None = None
    """Where weights are written for the servers, which see it by the same path; in the run directory without it."""
    update_timeout_seconds: float = field(default=600.0, validator=gt(0))
    """How long a server may take to load weights, or to pause."""
    read_timeout_seconds: float = field(default=3600.0, validator=gt(0))
    """How long a server may be silent within an answer; it is while weights are loaded."""
    health_interval_seconds: float = field(default=2.0, validator=gt(0))
    """How often it is asked whether it lives."""
    health_timeout_seconds: float = field(default=10.0, validator=gt(0))
    """How long it may take to say so."""
    max_failures: int = field(default=3, validator=ge(1))
    """So many servers in a row may fail a request, or die of it, before it fails."""


@frozen(kw_only=True)
class ServedEngine:
    """Servers of one kind as the engine of a run, which keeps their logs and weights in ``directory``."""

    backend: Backend
    config: ServerConfig
    directory: Path
