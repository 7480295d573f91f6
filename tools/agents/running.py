"""Running an agent: a scratch home, its recipe from ``examples/agents`` once per invocation, and a verdict."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import tomllib
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

import anyio
from anyio.abc import Process
from attrs import asdict, frozen
from tools.agents.judge import Report, judge
from tools.agents.play import PlayEngine
from tools.agents.scripts import EPISODES, Episode, Invocation
from tools.clients.staging import Stage, open_stage

from areal_actors.client import OpenAIProxyClient

__all__ = ["HERE", "Program", "Verdict", "load_programs", "run_agent", "to_document"]

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "examples" / "agents"
_LIMIT_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_NOWHERE = "http://127.0.0.1:9"  # the discard port: whatever is not loopback is refused at once
_PICTURE = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAQAAAADCAIAAAA7ljmRAAAAEElEQVR4nGP4z8AARwzEcQCukw/x0F8jngAAAABJRU5ErkJggg=="
)
"""A PNG of 4x3 pixels."""


@frozen(kw_only=True)
class Program:
    """An agent as ``agents.toml`` describes it."""

    name: str
    title: str
    protocol: str
    recipe: str
    """The file in ``examples/agents`` that runs it."""
    environment: str = ""
    """The environment that it is installed in, if it shares one with others."""
    arguments: tuple[str, ...] = ()
    """What follows the prompt in every invocation."""
    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    python: str = "python"
    """The command of the Python that ``pip`` installs for."""
    credentials: str = ""
    """Where the base URL and the key go."""
    note: str = ""

    @classmethod
    def parse(cls, name: str, table: Mapping[str, Any]) -> Program:
        """Return the program that a table of the file describes."""
        return cls(
            name=name, **{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        )

    @property
    def packages(self) -> tuple[str, ...]:
        """The pinned packages that are installed for it."""
        return (*self.npm, *self.pip)

    def find(self, environments: Path) -> Path | None:
        """Return the folder with its executables, or ``None`` if it is not installed."""
        home = environments / (self.environment or self.name)
        folder = home / "node_modules" / ".bin" if self.npm else home / "bin"
        return folder if folder.is_dir() else None


@frozen(kw_only=True)
class Verdict:
    """What one run of an agent has shown."""

    report: Report | None
    seconds: float
    faults: tuple[str, ...] = ()
    """Empty if everything is as it should be."""


def load_programs() -> dict[str, Program]:
    """Return all of ``agents.toml``, by name."""
    tables = tomllib.loads((HERE / "agents.toml").read_text(encoding="utf-8"))
    return {name: Program.parse(name, table) for name, table in tables.items()}


async def run_agent(program: Program, executables: Path, *, log: Path | None = None) -> Verdict:
    """Play the episode of ``program``, whose executables are in the folder ``executables``."""
    with tempfile.TemporaryDirectory(prefix="agent-") as scratch:
        root = Path(scratch)
        run = _Run(program=program, executables=executables, home=root / "home", work=root / "work", log=log)
        run.prepare()
        async with open_stage(PlayEngine) as stage:
            return await run.play(stage)


@frozen(kw_only=True)
class _Run:
    """One run: an agent in a scratch home and a working directory, and the output of all its starts."""

    program: Program
    executables: Path
    home: Path
    work: Path
    log: Path | None

    @property
    def output(self) -> Path:
        return self.log or self.home.with_name("output.log")

    def prepare(self) -> None:
        """Write the files that the agent finds."""
        self.home.mkdir()
        self.work.mkdir()
        (self.work / "picture.png").write_bytes(_PICTURE)
        if self.program.npm:  # modules are found next to a script, or above it
            (self.work / "node_modules").symlink_to(self.executables.parent)
            for module in RECIPES.glob("*.mjs"):
                (self.work / module.name).write_bytes(module.read_bytes())

    async def play(self, stage: Stage[PlayEngine]) -> Verdict:
        """Run every invocation, reward the last answer with 1, and judge the exported rows."""
        episode, faults = EPISODES[self.program.name](self.work), []
        stage.engine.begin(episode.script)
        started = time.monotonic()
        endpoint = stage.endpoint
        async with OpenAIProxyClient(endpoint.url, admin_key=endpoint.admin_key, task_id=self.program.name) as session:
            environment = _environment(self.home, self.executables, session)
            for invocation in episode.invocations:
                fault = await self._invoke(invocation, environment | invocation.variables, stage.engine)
                if fault is not None:
                    faults.append(fault)
                    break
            seconds = time.monotonic() - started
            with anyio.move_on_after(10):
                await stage.settle()
            if not stage.engine.cues:
                return Verdict(report=None, seconds=seconds, faults=(*faults, "it never called the model"))
            await session.set_last_reward(1.0)
            await session.end_session()
            record = await stage.record(session.session_id)
            exported = await session.export_episode(style="individual", discount=1.0)
        report = judge(record, exported, stage.engine.cues, stage.engine.recorded())
        faults += self._wrong_files(episode)
        faults += _wrong_figures(episode, report)
        return Verdict(report=report, seconds=seconds, faults=(*faults, *report.faults))

    async def _invoke(self, invocation: Invocation, environment: Mapping[str, str], engine: PlayEngine) -> str | None:
        """Run the recipe once, to its end; return what went wrong."""
        recipe = Path(self.program.recipe)
        folder = self.work if recipe.suffix == ".mjs" else RECIPES
        runner = {".sh": "bash", ".mjs": "node", ".py": "python"}[recipe.suffix]
        command = [runner, str(folder / recipe), invocation.prompt, *self.program.arguments, *invocation.arguments]
        with self.output.open("ab") as log:
            process = await anyio.open_process(
                command,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                cwd=self.work,
                env=environment,
                start_new_session=True,
            )
        try:
            with anyio.fail_after(_LIMIT_SECONDS):
                async with anyio.create_task_group() as tasks:
                    if invocation.is_interrupted:
                        tasks.start_soon(_interrupt, engine, process)
                    status = await process.wait()
                    tasks.cancel_scope.cancel()
        except TimeoutError:
            return f"“{invocation.prompt}” took longer than {_LIMIT_SECONDS:g} s: {self._last_words()}"
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process, self.home)
        if invocation.is_interrupted:
            return None if engine.held.is_set() else f"“{invocation.prompt}” ended early: {self._last_words()}"
        return None if status == 0 else f"“{invocation.prompt}” ended with status {status}: {self._last_words()}"

    def _wrong_files(self, episode: Episode) -> Iterator[str]:
        for name, text in episode.files.items():
            path = self.work / name
            found = path.read_text(encoding="utf-8") if path.exists() else None
            if found != text:
                yield f"{name} is {found!r} instead of {text!r}"

    def _last_words(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")[-600:].strip()


def _wrong_figures(episode: Episode, report: Report) -> Iterator[str]:
    for name, number in episode.expected.items():
        if (found := getattr(report, name)) != number:
            yield f"{found} {name.replace('_', ' ')} instead of {number}"
    if report.linked < report.follow_ups or report.wrong:
        yield (
            f"{report.linked} of {report.follow_ups} follow-ups are linked to their parent, {report.wrong} to another: "
            f"{', '.join(report.misses)}"
        )
    for kind, value in report.returns.items():
        if value != 1.0:
            yield f"a return of {value:g} in {kind}"


async def _interrupt(engine: PlayEngine, process: Process) -> None:
    """Interrupt the agent as a user does once an answer is held, and kill it if it stays."""
    await engine.held.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        await anyio.sleep(_GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)


async def _end(process: Process, home: Path) -> None:
    # The group outlives its leader where an agent leaves a server behind.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _kill_servers(home)
    await process.wait()
    await process.aclose()


def _kill_servers(home: Path) -> None:
    """Kill what an agent left in another session, as Cline does. It still has the agent's home directory."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"HOME={home}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def _environment(home: Path, executables: Path, session: OpenAIProxyClient) -> dict[str, str]:
    """Return the variables of a command agent, an empty home, and no way to other machines."""
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.completion_key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": session.completion_key,
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _NOWHERE),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        "HOME": str(home),
        "PATH": f"{executables}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "DO_NOT_TRACK": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
    }


def to_document(program: Program, verdict: Verdict) -> dict[str, Any]:
    """Return a program and its verdict as JSON."""
    report = None if verdict.report is None else asdict(verdict.report)
    return {
        "title": program.title,
        "packages": list(program.packages),
        "protocol": program.protocol,
        "recipe": program.recipe,
        "credentials": program.credentials,
        "note": program.note,
        "seconds": round(verdict.seconds, 1),
        "report": report,
        "faults": list(verdict.faults),
        "date": datetime.now(UTC).date().isoformat(),
        "version": version("areal_actors"),
    }
