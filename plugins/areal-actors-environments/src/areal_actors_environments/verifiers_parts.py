"""Classes below those of the library verifiers: its client, runtime and harness on our sessions and sandboxes.

Only ``verifiers`` of this package imports this module, when an environment is used: verifiers is an optional package.
"""

# Of an optional package, which is not installed where the types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import posixpath
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from hashlib import sha256
from importlib import metadata
from itertools import count
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import verifiers.v1 as vf
from attrs import define, evolve, field
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.dialects.chat import message_to_wire

from areal_actors.errors import SandboxError
from areal_actors.sandbox import BoxRequest, Network, Output, Sandbox, SandboxConfig, create_sandbox

_MAX_SAID = 4096
_KILLED = 137
_ID = re.compile(rb'"id": ?"([^"]+)"')
_METADATA = re.compile(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$")

playing: ContextVar[Play] = ContextVar("areal_verifiers_play")


def create_http_client() -> httpx.AsyncClient:
    """Return a client for requests to the proxy; a completion may take any time."""
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0), limits=httpx.Limits(), trust_env=False)


def attached(environment: type[Any]) -> type[Any]:
    """Return a subclass of an environment whose agents call the session of the episode that is being played."""

    class Attached(environment):  # type: ignore[misc]  # the class is known at run time only
        async def setup(self, agents: Any) -> None:
            await super().setup(agents)
            playing.get().attach(self.config, agents)

    Attached.__name__ = environment.__name__  # verifiers' messages name it
    return Attached


@define(kw_only=True)
class Play:
    """One episode: its session, its boxes, and what was seen of it."""

    base_url: str
    api_key: str = field(repr=False)
    http_client: httpx.AsyncClient
    sandbox: SandboxConfig
    given: Mapping[str, Any]
    """The user's settings of the environment: a seat with a runtime there keeps it."""
    last_completions: dict[str, str] = field(factory=dict)
    """The id of the last completion of each trace."""
    last_output: str = ""
    """The end of what the harness wrote."""
    servers: list[tuple[Any, str]] = field(factory=list)

    async def run(self, environment: Any, task: Any, model: str) -> Any:
        """Play a task, and return verifiers' episode."""
        playing.set(self)
        try:
            return await environment.run_episode(task, vf.ModelContext(model=model, client=vf.EvalClientConfig()))
        finally:
            # The server keeps a client for each configuration, and each session is another one.
            for server, key in self.servers:
                server.clients.pop(key, None)

    def attach(self, config: Any, agents: Any) -> None:
        """Let each agent of the environment call the session, in the role of its seat, and run in a box."""
        seats = [name for name, value in config if isinstance(value, vf.AgentConfig)]
        for seat in seats:
            agent, given = getattr(agents, seat), self.given.get(seat) or {}
            # A seat with a client is played by another model, which its author or the user has chosen.
            if getattr(config, seat).client is None:
                # With api_key_var, the client would read a variable of this process, which runs many sessions.
                role = {"x-areal-agent": seat} if len(seats) > 1 else {}
                client = vf.EvalClientConfig(base_url=self.base_url, api_key_var="", headers=role)
                agent.ctx = replace(agent.ctx, client=client)
                key = client.model_dump_json()
                agent.interception.clients[key] = _SessionClient(self, client)
                self.servers.append((agent.interception, key))
            if "runtime" not in given:
                self._run_in_boxes(agent)

    def _run_in_boxes(self, agent: Any) -> None:
        """Replace the agent's ways to run by those that lend it a box."""
        # Verifiers' table of runtimes is private, and bound at import in several modules; ``runtime`` is an argument.
        run, interaction = agent.run, agent.interaction

        async def run_in_box(task: Any, *, runtime: Any = None, **options: Any) -> Any:
            if runtime is not None:
                return await run(task, runtime=runtime, **options)
            async with self._open_box(agent, task) as box:
                return await run(task, runtime=box, **options)

        @asynccontextmanager
        async def interact_in_box(task: Any, *, runtime: Any = None, **options: Any) -> AsyncIterator[Any]:
            if runtime is not None:
                async with interaction(task, runtime=runtime, **options) as opened:
                    yield opened
                return
            async with self._open_box(agent, task) as box, interaction(task, runtime=box, **options) as opened:
                yield opened

        agent.run, agent.interaction = run_in_box, interact_in_box

    @asynccontextmanager
    async def _open_box(self, agent: Any, task: Any) -> AsyncIterator[BoxRuntime]:
        config, image = self.sandbox, task.data.image
        if image is not None and config.backend == "bubblewrap":
            raise SandboxError(f"The task needs the image {image}; bubblewrap has none: set the sandbox to docker.")
        if image is not None and config.is_isolated:
            config = evolve(config, image=image)
        directory = task.data.workdir if config.is_isolated else None
        request = BoxRequest(
            config=config,
            proxy_url=agent.interception.base_url,
            work_directory=directory or "/workspace",
        )
        async with create_sandbox(config.backend).open(request) as box:
            runtime = BoxRuntime(box, config, self)
            # The policy that a borrowed box is compared with.
            agent.runtime_config = runtime.config
            try:
                yield runtime
            finally:
                runtime.stopped = True
                await runtime.end_processes()


class _SessionClient(EvalClient):  # type: ignore[misc]  # its base is Any here
    """Relays to the session of an episode, over connections that all episodes share."""

    def __init__(self, play: Play, config: Any) -> None:
        # Not that of the base class, which reads the key from a variable and opens connections of its own.
        self.base_url = config.base_url
        self.api_key = play.api_key
        self.headers = dict(config.headers)
        self.client = play.http_client
        self._completions = play.last_completions

    async def get_response(self, *arguments: Any, session_id: Any = None, **options: Any) -> Any:
        response = await super().get_response(*arguments, session_id=session_id, **options)
        if isinstance(response.raw, dict) and response.raw.get("id"):
            self._completions[session_id] = response.raw["id"]
        return response

    async def relay(self, dialect: Any, body: Any, session_id: Any = None, headers: Any = None) -> Any:
        reply = await super().relay(dialect, body, session_id, headers)

        async def chunks() -> AsyncIterator[bytes]:
            is_named = False
            async for chunk in reply.chunks:
                if not is_named and (found := _ID.search(chunk)):
                    self._completions[session_id], is_named = found[1].decode(), True
                yield chunk

        return RelayReply(content_type=reply.content_type, chunks=chunks(), close=reply.close)

    async def close(self) -> None:
        """Leave the connections open."""


class BoxRuntime(vf.Runtime):  # type: ignore[misc]
    """A runtime of verifiers on a box of ours, which is opened and closed around the agent's run."""

    is_local: ClassVar[bool] = True

    def __init__(self, box: Sandbox, config: SandboxConfig, play: Play) -> None:
        super().__init__()
        self._box = box
        self._play = play
        self._processes: list[BoxProcess] = []
        # Processes that are being opened count, too: hooks of a rubric run at the same time.
        self._numbers = count()
        self.has_host = config.backend in ("none", "bubblewrap")
        self.has_network = not config.is_isolated or config.network is Network.HOST
        if not config.is_isolated:
            self.config = vf.SubprocessConfig()
        else:
            # The nearest of verifiers' kinds; it decides what tasks and harnesses may ask for.
            self.config = vf.DockerConfig(
                image=config.image or "host", workdir=box.work_directory, allow=["*"] if self.has_network else []
            )
        kind = vf.runtimes.SubprocessRuntimeInfo if not config.is_isolated else vf.runtimes.DockerRuntimeInfo
        self.info = kind(**self.config.model_dump(), id=box.work_directory)
        self.scripts_dir = f"{box.work_directory}/.scripts"

    async def start(self) -> None:
        """Do nothing: the box is open."""

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: bytes = b"",
        on_stdout: Output | None = None,
        on_stderr: Output | None = None,
    ) -> Any:
        """Run a command to its end."""
        environment = self.process_env(dict(env))
        try:
            ended = await self._box.run(
                argv, environment=environment, stdin=stdin, on_stdout=on_stdout, on_stderr=on_stderr
            )
        except SandboxError as error:
            raise vf.SandboxError(str(error)) from error
        # As shells tell of signals; verifiers compares with 0.
        status = ended.status if ended.status >= 0 else 128 - ended.status
        return vf.ProgramResult(status, ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace"))

    async def run_program(self, argv: Sequence[str], env: Mapping[str, str]) -> Any:
        """Run the harness, and keep the end of its output for messages."""
        ended = await self.run(argv, env)
        self._play.last_output = (ended.stderr or ended.stdout).strip()[-_MAX_SAID:]
        return ended

    async def run_background(self, argv: Sequence[str], env: Mapping[str, str], log: str) -> None:
        """Start a command that runs until the box closes."""
        started = await self.run(["sh", "-c", 'log=$1; shift; "$@" > "$log" 2>&1 &', "sh", log, *argv], env)
        if started.exit_code:
            raise vf.SandboxError(f"{argv[0]} cannot be started: {started.stderr.strip()}")

    async def open_process(self, argv: Sequence[str], env: Mapping[str, str]) -> BoxProcess:
        """Start a process whose input and output stay open, such as a harness that speaks ACP."""
        directory = f"{self.scripts_dir}/process-{next(self._numbers)}"
        made = await self.run(["sh", "-c", 'mkdir -p "$1" && mkfifo "$1/in"', "sh", directory], {})
        if made.exit_code:
            raise vf.SandboxError(f"{argv[0]} cannot be started: {made.stderr.strip()}")
        process = BoxProcess(self, directory, argv, env)
        self._processes.append(process)
        return process

    async def end_processes(self) -> None:
        """Kill the processes that are still open."""
        for process in self._processes:
            await process.kill()

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        # The whole file is read: of its output, a command only returns the end.
        found = bytearray()
        command = ["cat", "--", path] if max_bytes is None else ["head", "-c", str(max_bytes), "--", path]
        ended = await self.run(command, {}, on_stdout=found.extend)
        if ended.exit_code:
            raise vf.SandboxError(f"read {path!r}: {ended.stderr.strip()[-500:]}")
        return bytes(found)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, in directories that are created."""
        script = 'mkdir -p -- "$1" && cat > "$2"'
        ended = await self.run(["sh", "-c", script, "sh", posixpath.dirname(path) or ".", path], {}, stdin=data)
        if ended.exit_code:
            raise vf.SandboxError(f"write {path!r}: {ended.stderr.strip()[-500:]}")

    def host_url(self, url: str) -> str:
        """Return the address by which the box reaches the interception server."""
        inner = None if self._box.proxy_url is None else urlsplit(self._box.proxy_url)
        return url if inner is None else urlsplit(url)._replace(netloc=inner.netloc).geturl()

    async def prepare_execution(self, routes: list[str] | None) -> None:
        """Check that the box reaches all addresses that the agent is given.

        Raises verifiers' ``SandboxError`` for a tool server elsewhere.
        """
        reached = urlsplit(self._box.proxy_url or "").netloc
        far = [url for url in routes or () if not self.has_network and urlsplit(url).netloc != reached]
        if far:
            raise vf.SandboxError(
                f"The task's tools are served at {', '.join(far)}, which its sandbox cannot reach; set "
                "rollout.openai.sandbox: {network: host}."
            )

    async def prepare_uv_script(self, script: str | bytes, env: Any = None, *, activate: bool = True) -> list[str]:
        """Return a command that runs a script with its dependencies.

        The Python of this run is used if it has them; uv would download them for the first episode, and a sandbox has
        no network.
        """
        text = script.decode() if isinstance(script, bytes) else script
        missing = _missing_dependencies(text) if self.has_host else ["no Python of the run in a container"]
        if missing and not self.has_network:
            raise vf.HarnessError(
                f"The harness needs packages that the sandbox cannot download ({', '.join(missing)}); install them "
                "here, or set rollout.openai.sandbox: {network: host}."
            )
        if missing:
            found: list[str] = await super().prepare_uv_script(script, env, activate=activate)
            return found
        path = f"{self.scripts_dir}/{sha256(text.encode()).hexdigest()}.py"
        await self.write(path, text.encode())
        return [sys.executable, path]


def _missing_dependencies(script: str) -> list[str]:
    """Return the requirements of a script (PEP 723) that this environment does not meet."""
    from packaging.requirements import Requirement

    found = _METADATA.search(script)
    block = "" if found is None else re.sub(r"(?m)^# ?", "", found[1])
    wanted = list(map(Requirement, tomllib.loads(block).get("dependencies", ())))
    missing = []
    for requirement in wanted:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(str(requirement))
            continue
        if requirement.url or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement}, here is {version}")
        # Packages of an extra are not there because the package is; those that it always requires are.
        extras = [{"extra": extra} for extra in requirement.extras]
        parts = map(Requirement, metadata.requires(requirement.name) or ()) if extras else ()
        wanted += [part for part in parts if part.marker and any(map(part.marker.evaluate, extras))]
    return missing


class BoxProcess(vf.RuntimeProcess):  # type: ignore[misc]
    """A process in a box with its pipes open.

    A box runs commands with an input that is complete. This one reads a named pipe, which each write opens anew; it
    also holds the other end itself, so that its input does not end between two writes.
    """

    def __init__(self, runtime: BoxRuntime, directory: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._runtime = runtime
        self._directory = directory
        self._chunks: tuple[asyncio.Queue[bytes | None], ...] = (asyncio.Queue(), asyncio.Queue())
        self.stdout, self.stderr = map(_read_queue, self._chunks)
        self._running = asyncio.create_task(self._run(argv, env))

    async def _run(self, argv: Sequence[str], env: Mapping[str, str]) -> int:
        script = 'echo $$ > "$1/pid"; exec 3<> "$1/in"; shift; exec "$@" <&3 3<&-'
        out, err = (queue.put_nowait for queue in self._chunks)
        command = ["sh", "-c", script, "sh", self._directory, *argv]
        try:
            ended = await self._runtime.run(command, env, on_stdout=out, on_stderr=err)
        except asyncio.CancelledError:
            return _KILLED
        finally:
            out(None)
            err(None)
        return int(ended.exit_code)

    async def write(self, data: bytes) -> None:
        """Write to the process's input. Raises ``BrokenPipeError`` if it has ended."""
        command = ["sh", "-c", 'cat 1<> "$1/in"', "sh", self._directory]
        writing = asyncio.create_task(self._runtime.run(command, {}, stdin=data))
        # What a process does not read stays in the pipe, which holds 64 KiB; then the writer waits.
        await asyncio.wait({writing, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not writing.done() or self._running.done():
            writing.cancel()
            raise BrokenPipeError("the process has ended")
        await writing

    async def wait(self) -> int:
        """Return its exit status, once it has ended."""
        await asyncio.wait({self._running})
        return self._status()

    async def poll(self) -> int | None:
        """Return its exit status, or ``None`` while it runs."""
        return self._status() if self._running.done() else None

    def _status(self) -> int:
        # A task that is cancelled before its first step has no result.
        return _KILLED if self._running.cancelled() else self._running.result()

    async def terminate(self) -> None:
        """Send it SIGTERM."""
        await self._runtime.run(["sh", "-c", 'kill "$(cat "$1/pid")"', "sh", self._directory], {})

    async def kill(self) -> None:
        """Kill it, and what it has started."""
        self._running.cancel()
        await asyncio.wait({self._running})


async def _read_queue(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (chunk := await queue.get()) is not None:
        yield chunk


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """Settings of ``chat``: only those that every harness has."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """A chat without tools in the process of the run.

    verifiers' ``null`` does the same, and tools, in a Python process for each turn of the user, which takes seconds.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917 - the interface of a harness
        self,
        ctx: Any,
        trace: Any,  # noqa: ARG002
        runtime: Any,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: Any,  # noqa: ARG002
        data: Any,
    ) -> Any:
        """Send the conversation once, to the address of this process, not that of a box."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        response = await playing.get().http_client.post(
            f"{endpoint}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"authorization": f"Bearer {secret}"},
        )
        return vf.ProgramResult(0 if response.is_success else 1, "", "" if response.is_success else response.text)
