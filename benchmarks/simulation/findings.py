"""What a run says: whose core is full first, at how many sessions, and what comes second.

It is the utilisation law: an actor that spends ``u`` cores on ``n`` sessions fills one core at ``n / u``. Work that
several processes can share (proxies, engines' actors) needs so many of them instead. An actor in a process of its own
pays for its share of the wire besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen
from benchmarks.simulation.agents import PROXY
from benchmarks.simulation.meter import LOOP
from benchmarks.simulation.model import ACTORS, ENGINES, Measured

__all__ = ["HOP_SECONDS", "Findings", "Load", "find", "format_findings", "to_json"]

HOP_SECONDS = 45e-6
"""CPU of one message between processes, both of them together: the gate of ``benchmarks remote`` at 64 in flight."""
_SHARED = (PROXY, "generation")
"""Labels whose work any number of processes can share."""


@frozen(kw_only=True)
class Load:
    """What one label does in a virtual second, and where that ends."""

    label: str
    cores: float
    us_per_turn: float
    messages_per_second: float
    """Received, items of streams included."""
    wire_cores: float
    """What more it takes in a process of its own."""
    longest_ms: float
    """The longest that it kept the loop at once."""
    max_sessions: float
    """Where it fills a core, in a process of its own."""

    @property
    def is_shared(self) -> bool:
        """Whether several processes can share it."""
        return self.label in _SHARED


@frozen(kw_only=True)
class Findings:
    """Loads with the heaviest first."""

    loads: tuple[Load, ...]
    num_sessions: int
    """That were live."""
    turns_per_second: float
    requests_per_second: float
    one_process_cores: float
    """Of everything that would live in the one process of a service, engines' pretence left out."""
    bytes_per_session: float
    """Resident, per session that is remembered: live, or ended and not yet trained."""

    @property
    def bottlenecks(self) -> tuple[Load, ...]:
        """What no second process can help with, the first to saturate first."""
        return tuple(load for load in self.loads if not load.is_shared)

    @property
    def one_process_sessions(self) -> float:
        """Where one process is full."""
        return self.num_sessions / self.one_process_cores


def find(measured: Measured) -> Findings:
    """Read the figures of a run."""
    seconds, cpu = measured.reading.at, measured.reading.cpu
    loads = sorted((_load(label, measured) for label in (*ACTORS, PROXY) if label in cpu), key=_weight, reverse=True)
    return Findings(
        loads=tuple(loads),
        num_sessions=measured.num_live,
        turns_per_second=measured.num_turns / seconds,
        requests_per_second=measured.num_requests / seconds,
        one_process_cores=sum(cpu.get(label, 0.0) for label in (*ACTORS, PROXY, LOOP)) / seconds,
        bytes_per_session=measured.resident_bytes / max(measured.num_remembered, 1),
    )


def _load(label: str, measured: Measured) -> Load:
    seconds, messages = measured.reading.at, measured.reading.messages
    received = sum(num for (_, receiver, _), num in messages.items() if receiver == label)
    sent = sum(num for (sender, receiver, _), num in messages.items() if sender == label != receiver)
    cores = measured.reading.cpu[label] / seconds
    wire = (received + sent) * HOP_SECONDS / 2 / seconds
    return Load(
        label=label,
        cores=cores,
        us_per_turn=measured.reading.cpu[label] / max(measured.num_turns, 1) * 1e6,
        messages_per_second=received / seconds,
        wire_cores=wire,
        longest_ms=measured.longest.get(label, 0.0) * 1e3,
        max_sessions=measured.num_live / max(cores + wire, 1e-9),
    )


def _weight(load: Load) -> float:
    return load.cores + load.wire_cores


def to_json(measured: Measured) -> dict[str, Any]:
    """All figures, as a plain dict."""
    found = find(measured)
    return {
        "sessions_live": found.num_sessions,
        "sessions_remembered": measured.num_remembered,
        "turns_per_second": found.turns_per_second,
        "requests_per_second": found.requests_per_second,
        "episodes_per_second": measured.num_episodes / measured.reading.at,
        "version": measured.version,
        "latency_seconds": {name: measured.observed.percentile(p) for name, p in (("p50", 50), ("p99", 99))},
        "one_process": {"cores": found.one_process_cores, "max_sessions": found.one_process_sessions},
        "engine_pretence_cores": measured.reading.cpu.get(ENGINES, 0.0) / measured.reading.at,
        "event_loop_cores": measured.reading.cpu.get(LOOP, 0.0) / measured.reading.at,
        "bytes_per_session": found.bytes_per_session,
        "queues": measured.queues,
        "actors": {load.label: _load_to_json(load) for load in found.loads},
        "messages": {" ".join(key): num for key, num in sorted(measured.reading.messages.items()) if num},
        "virtual_seconds": measured.reading.at,
        "wall_seconds": measured.wall_seconds,
    }


def _load_to_json(load: Load) -> dict[str, float]:
    return {
        "cores": load.cores,
        "us_per_turn": load.us_per_turn,
        "messages_per_second": load.messages_per_second,
        "wire_cores": load.wire_cores,
        "longest_ms": load.longest_ms,
        "max_sessions": load.max_sessions,
    }


def format_findings(measured: Measured) -> str:
    """A page for people."""
    found = find(measured)
    seconds, observed = measured.reading.at, measured.observed
    rates = f"{found.turns_per_second:.0f} turns/s, {measured.num_episodes / seconds:.1f} episodes/s"
    latency = f"latency {observed.percentile(50):.1f} s (median), {observed.percentile(99):.1f} s (p99)"
    lines = [
        f"{found.num_sessions} live sessions on {measured.scenario.num_engines} engines: {rates}",
        f"{latency}; weights of version {measured.version}",
    ]
    lines.append(
        f"{'':12}{'cores':>8}{'µs/turn':>9}{'messages/s':>12}{'+ wire':>8}{'longest ms':>12}{'full at sessions':>18}"
    )
    lines += [_format_load(load) for load in found.loads]
    lines.append(
        f"in one process: {found.one_process_cores:.2f} cores, full at {found.one_process_sessions:.0f} sessions"
    )
    lines.append(
        f"memory: {found.bytes_per_session / 1024:.0f} KiB for each of {measured.num_remembered} sessions in it"
    )
    return "\n".join([*lines, *_format_bottlenecks(found.bottlenecks)])


def _format_load(load: Load) -> str:
    full = f"{load.max_sessions:.0f}" + (" each" if load.is_shared else "")
    return (
        f"{load.label:12}{load.cores:8.3f}{load.us_per_turn:9.1f}{load.messages_per_second:12.0f}"
        f"{load.wire_cores:8.3f}{load.longest_ms:12.1f}{full:>18}"
    )


def _format_bottlenecks(bottlenecks: Sequence[Load]) -> list[str]:
    return [
        f"{name} bottleneck: {load.label}, one core at {load.max_sessions:.0f} sessions"
        for name, load in zip(("first", "second"), bottlenecks, strict=False)
    ]
