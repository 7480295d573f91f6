"""Settings for inference servers: where they run, or how they are started. Imports neither HTTP libraries nor torch.

Another kind of server is a member of ``Backend``, a section of ``ServerSections`` with the same name, and a module of
this package with that name (``dialect``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from attrs import field, frozen
from attrs.validators import ge, gt, le

from areal_actors.lib.settings import constant


class Backend(StrEnum):
    """The engine that generates."""

    TORCH = "torch"
    """The embedded engine, in this process."""
    SGLANG = "sglang"
    VLLM = "vllm"

    @property
    def records_experts(self) -> bool:
        """Whether it reports the experts of each token."""
        return self is not Backend.VLLM


@frozen(kw_only=True)
class ServerConfig:
    """Inference servers: those at ``urls``, or ``num_servers`` that are started here and end with the run."""

    urls: tuple[str, ...] = ()
    """Servers that are already running, such as http://node1:30000; without any, servers are started."""
    gateway_url: str | None = None
    """A gateway in front of all servers that receives generation requests; null: they go to the servers directly."""
    api_key_file: Path | None = None
    """A file that contains only the API key of the servers at urls."""
    num_servers: int = field(default=1, validator=ge(1))
    """Servers to start, each with a copy of the model and its share of the GPUs of the machine."""
    python: str = "python"
    """The Python in which the server is installed; never that of this process, because their packages conflict."""
    command: tuple[str, ...] = ()
    """Program and first arguments, replacing python -m and the server's module."""
    arguments: tuple[str, ...] = ()
    """Additional arguments of the server, after model, host and port."""
    environment: Mapping[str, str] = field(factory=dict)
    """Variables in addition to those of this process, such as CUDA_VISIBLE_DEVICES."""
    port: int = field(default=0, validator=[ge(0), le(65535)])
    """Port of the first server; the others use the following ports. 0: any free ports."""
    start_timeout_seconds: float = field(default=900.0, validator=gt(0))
    """How long a server may take until it answers."""
    publish_directory: Path | None = None
    """Directory for weights, which the servers see under the same path; null: in the run directory."""
    update_timeout_seconds: float = constant(600.0)
    """How long a server may take to load weights, or to pause."""
    read_timeout_seconds: float = constant(3600.0)
    """How long a server may send nothing during an answer; it does while weights are loaded."""
    health_interval_seconds: float = constant(2.0)
    """Interval between health checks."""
    health_timeout_seconds: float = constant(3.5)
    """How long a health check may take. After two that took longer, requests continue at other servers."""
    hang_timeout_seconds: float = constant(90.0)
    """A server that was started here, has served, and has not answered health checks for this long is killed and
    started again."""
    stall_timeout_seconds: float = field(default=60.0, validator=gt(0))
    """A server that has sampled before, and then has requests but sends no token of any of them for this long, has
    stalled even if it answers health checks: its requests continue at other servers, and it gets no others until it
    has sampled a token. After twice this long, one that was started here is killed and started again. Longer than the
    longest prompt takes. Time in which it is paused or loads weights does not count."""
    stream_interval: int = constant(32)
    """Tokens per event of answers that no client streams; each event costs 40 µs on its way. A lost server loses the
    tokens of an incomplete event, which another one samples again."""
    max_failures: int = constant(3)
    """A generation fails after this many attempts in a row without a new token."""


@frozen(kw_only=True)
class ServerSections:
    """The settings of each kind of server, in a section with its name."""

    sglang: ServerConfig = field(factory=ServerConfig)
    vllm: ServerConfig = field(factory=ServerConfig)


@frozen(kw_only=True)
class AdapterSlots:
    """The room that servers need for adapters: adapters of ``rank``, whose modules are ``modules``; empty means all."""

    rank: int
    modules: tuple[str, ...] = ()


@frozen(kw_only=True)
class ServedEngine:
    """Servers of one kind as the engine of a run, with their logs and weights in ``directory``.

    With ``adapters`` they keep their weights and load adapters next to them. With ``records_experts`` they report the
    experts of each token.
    """

    backend: Backend
    config: ServerConfig
    directory: Path
    adapters: AdapterSlots | None = None
    records_experts: bool = False
