"""Running drivers: one process a client, one session a scenario, and a verdict for each."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import asdict, define, field, frozen
from tools.clients.judge import Verdict, judge
from tools.clients.staging import ScriptedEngine, Stage

from areal_actors.client import OpenAIProxyClient

__all__ = ["PROTOCOLS", "SCENARIOS", "Environment", "load_environments", "run_client", "to_document"]

HERE = Path(__file__).parent

PROTOCOLS = {"chat": "Chat completions", "responses": "Responses", "messages": "Anthropic Messages"}

SCENARIOS = {
    "single_turn": "single turn",
    "by_key": "by key alone",
    "three_turns": "three turns",
    "tool": "tool",
    "parallel_tools": "parallel tools",
    "thoughtful_tool": "thinking and a tool",
    "six_turns": "six turns",
    "streaming": "streaming",
    "streaming_tools": "streamed tools",
    "six_turns_streamed": "six turns, streamed",
    "twenty_at_once": "20 at once",
    "previous_response": "`previous_response_id`",
    "structured": "structured output",
    "cancelled": "hang-up",
    "wrong_key": "401",
    "bad_parameter": "400",
    "busy": "429",
    "overflow": "too long",
}
"""What is played, in this order, and how tables call it."""

_TIME_LIMIT_SECONDS = 60.0
_MAX_LINE = 1 << 20
_NOWHERE = "http://127.0.0.1:9"  # the discard port: whatever is not loopback is refused at once
_QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "AGNO_TELEMETRY": "false",
    "CAMEL_LOGGING_DISABLED": "true",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}


@frozen(kw_only=True)
class Environment:
    """A client as ``environments.toml`` describes it."""

    name: str
    title: str
    packages: tuple[str, ...]
    driver: str
    protocols: tuple[str, ...]
    note: str = ""
    """Why some of its follow-up turns are not linked, where that is so."""

    @classmethod
    def parse(cls, name: str, table: Mapping[str, Any]) -> Environment:
        """One table of the file."""
        lists = {key: tuple(table[key]) for key in ("packages", "protocols")}
        return cls(name=name, title=table["title"], driver=table["driver"], note=table.get("note", ""), **lists)


def load_environments() -> dict[str, Environment]:
    """All of ``environments.toml``, by name."""
    tables = tomllib.loads((HERE / "environments.toml").read_text(encoding="utf-8"))
    return {name: Environment.parse(name, table) for name, table in tables.items()}


async def run_client(
    stage: Stage[ScriptedEngine],
    environment: Environment,
    python: Path | str,
    *,
    scenarios: Sequence[str] = tuple(SCENARIOS),
    log: Path | None = None,
) -> dict[str, dict[str, Verdict]]:
    """Play ``scenarios`` with the interpreter ``python``, which has the client; verdicts by protocol and scenario."""
    verdicts: dict[str, dict[str, Verdict]] = {}
    async with _open_driver(environment, python, log) as driver:
        for protocol in environment.protocols:
            verdicts[protocol] = {}
            for number, scenario in enumerate(scenarios):
                label = f"{protocol[0]}{number}"
                verdicts[protocol][scenario] = await _play(
                    stage, driver, protocol=protocol, scenario=scenario, label=label
                )
    return verdicts


async def _play(stage: Stage[ScriptedEngine], driver: _Driver, *, protocol: str, scenario: str, label: str) -> Verdict:
    before = set(stage.engine.prompts)
    async with OpenAIProxyClient(stage.endpoint.url, admin_key=stage.endpoint.admin_key, task_id=label) as session:
        task = {
            "protocol": protocol,
            "scenario": scenario,
            "label": label,
            "session_url": session.session_url,
            "root_url": stage.endpoint.url,
            "api_key": session.api_key,
        }
        reply = await driver.ask(task)
        with anyio.move_on_after(10):
            await stage.settle()
        record = await stage.record(session.session_id)
        prompts = {name: text for name, text in stage.engine.prompts.items() if name not in before}
        return judge(scenario, reply, record, prompts)


@define
class _Driver:
    """The client's process. One that is stuck is replaced, so that the next scenario has its chance."""

    command: list[str]
    log: Path
    directory: str
    process: Process | None = None
    lines: BufferedByteReceiveStream | None = field(default=None)

    async def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Have one scenario played."""
        if self.process is None:
            await self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.lines is not None
        try:
            with anyio.fail_after(_TIME_LIMIT_SECONDS):
                await self.process.stdin.send(json.dumps(task).encode() + b"\n")
                reply: dict[str, Any] = json.loads(await self.lines.receive_until(b"\n", _MAX_LINE))
        except TimeoutError:
            reply = {"outcome": "failed", "why": f"no outcome within {_TIME_LIMIT_SECONDS:g} s", "errors": []}
            await self.stop()
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            reply = {"outcome": "failed", "why": "the client's process ended", "errors": []}
            await self.stop()
        return reply

    async def start(self) -> None:
        """Start the process."""
        with self.log.open("ab") as log:
            self.process = await anyio.open_process(
                self.command, stdin=PIPE, stdout=PIPE, stderr=log, env=_environment(self.directory)
            )
        assert self.process.stdout is not None
        self.lines = BufferedByteReceiveStream(self.process.stdout)

    async def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            with anyio.CancelScope(shield=True):
                if self.process.returncode is None:
                    self.process.kill()
                await self.process.wait()
                await self.process.aclose()
            self.process = None


@asynccontextmanager
async def _open_driver(environment: Environment, python: Path | str, log: Path | None) -> AsyncIterator[_Driver]:
    with tempfile.TemporaryDirectory() as directory:
        command = [str(python), str(HERE / "drivers" / environment.driver)]
        driver = _Driver(command, log or Path(directory) / "driver.log", directory)
        try:
            yield driver
        finally:
            await driver.stop()


def _environment(directory: str) -> dict[str, str]:
    """Of a driver: no telemetry, no configuration of this user, and no way to other machines."""
    return {
        **_QUIET,
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _NOWHERE),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        "HOME": directory,
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
    }


def to_document(environment: Environment, verdicts: Mapping[str, Mapping[str, Verdict]]) -> dict[str, Any]:
    """A client and its verdicts as JSON."""
    return {
        "title": environment.title,
        "packages": list(environment.packages),
        "note": environment.note,
        "protocols": {
            protocol: {name: _verdict_document(verdict) for name, verdict in played.items()}
            for protocol, played in verdicts.items()
        },
    }


def _verdict_document(verdict: Verdict) -> dict[str, Any]:
    document = {"outcome": verdict.outcome}
    if verdict.why is not None:
        document["why"] = verdict.why
    return document | ({"links": asdict(verdict.links)} if verdict.links.follow_ups else {})
