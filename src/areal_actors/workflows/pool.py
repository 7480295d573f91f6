"""A pool of child processes that run one agent: ``rollout.openai.mode: subprocess``.

Each child creates the agent once and then runs one episode at a time (``worker``). Children are started on demand and
reused; one that dies, or whose episode is cancelled, is replaced. Leaving the block that opened the pool ends all of
its processes.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import asdict, field, frozen
from attrs.validators import ge, gt

from areal_actors.domain import InteractionId
from areal_actors.errors import EpisodeError, WorkflowError
from areal_actors.lib.child_process import BoundedLog, Child
from areal_actors.lib.task_groups import open_tasks
from areal_actors.workflows import context as workflow_context
from areal_actors.workflows.agents import Agent, LimitedAgent
from areal_actors.workflows.processes import check_problem, inherited_environment
from areal_actors.workflows.rollout import resolve_agent

_MAX_REPLY_BYTES = 16 * 1024 * 1024

_BOOT = (
    "import json, sys; lifeline, sys.path[:] = json.loads(sys.argv.pop()); "
    "from areal_actors.workflows.worker import serve; serve(lifeline)"
)
"""The child's program, with the ``sys.path`` of this process.

It is not started with ``-m``, because that module would become ``__main__``.
"""

_GONE = (
    OSError,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.DelimiterNotFound,
    anyio.IncompleteRead,
    json.JSONDecodeError,
)
"""Errors of an exchange with a process that died or sent malformed data."""


@frozen(kw_only=True)
class PoolConfig:
    """The number of processes, how long each may take to start, and where their output is logged."""

    num_workers: int = field(default=4, validator=ge(1))
    start_timeout_seconds: float = field(default=60.0, validator=gt(0))
    logs: Path | None = None
    """A directory; each process writes ``<number>.log`` there."""


class AgentPool(LimitedAgent):
    """An agent whose episodes run in child processes, at most ``num_workers`` at once."""

    def __init__(self, agent: Mapping[str, Any], config: PoolConfig, tasks: TaskGroup) -> None:
        self._agent = agent
        self._config = config
        self._tasks = tasks
        self._name = "agent"
        self._places = anyio.Semaphore(config.num_workers)
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._is_closed = False
        logs = config.logs
        self._logs = [
            BoundedLog(None if logs is None else logs / f"{number}.log") for number in range(config.num_workers)
        ]

    @classmethod
    @asynccontextmanager
    async def open(cls, agent: Mapping[str, Any], config: PoolConfig | None = None) -> AsyncIterator[AgentPool]:
        """Start the first process; all processes end with the block.

        ``agent`` is the result of ``serialize_agent``. Raises ``WorkflowError`` with the traceback of the child if
        the agent cannot be created there.
        """
        async with open_tasks() as tasks:
            pool = cls(agent, config or PoolConfig(), tasks)
            try:
                # An agent that cannot be created is reported before the run begins.
                pool._give_back(await pool._take())
                yield pool
            finally:
                pool._is_closed = True
                # Also if the run is cancelled: no process outlives the block.
                with anyio.CancelScope(shield=True):
                    async with anyio.create_task_group() as killing:
                        for worker in pool._workers:
                            killing.start_soon(worker.kill)

    @property
    def agent_name(self) -> str:
        """The name of the agent's class, once a child has reported it."""
        return self._name

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Agent]:
        """Wait for a free process. Raises ``EpisodeError`` if a new one is needed and cannot be started."""
        async with self._places:
            try:
                worker = await self._take()
            except WorkflowError as error:
                raise EpisodeError(str(error)) from error
            try:
                yield worker
            finally:
                self._give_back(worker)

    async def _take(self) -> _Worker:
        """Return the process that was used last, since its caches are warm. An idle one that died is replaced."""
        if self._is_closed:
            raise WorkflowError(f"The processes of {self._name} have ended; run episodes inside the block of the pool.")
        # The one that was used last first: its caches are warm.
        while self._idle:
            idle = self._idle.pop()
            if idle.is_alive:
                return idle
            await idle.kill()
            self._remove(idle)
        log = self._logs.pop(0)
        try:
            worker = await _Worker.start(self._agent, log, self._config.start_timeout_seconds, self._tasks)
        except BaseException:
            self._logs.append(log)
            raise
        self._name = worker.agent_name
        self._workers.add(worker)
        return worker

    def _give_back(self, worker: _Worker) -> None:
        if worker.is_broken:
            self._remove(worker)
        else:
            self._idle.append(worker)

    def _remove(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        self._logs.append(worker.log)


class _Worker:
    """One child process. It is killed after an incomplete exchange, because its state is unknown then."""

    def __init__(self, child: Child, log: BoundedLog) -> None:
        assert child.process.stdout is not None
        self.log = log
        self.agent_name = "agent"
        self._child = child
        self._replies = BufferedByteReceiveStream(child.process.stdout)
        self._is_busy = False

    @classmethod
    async def start(
        cls, agent: Mapping[str, Any], log: BoundedLog, timeout_seconds: float, tasks: TaskGroup
    ) -> _Worker:
        """Start a child and wait until it has created its agent.

        Raises ``WorkflowError`` with its output if it fails.
        """
        child = await Child.start(
            lambda lifeline: [sys.executable, "-c", _BOOT, json.dumps([lifeline, sys.path])],
            log=log,
            environment=inherited_environment(),
        )
        tasks.start_soon(child.listen)
        worker = cls(child, log)
        try:
            with anyio.fail_after(timeout_seconds):
                reply = await worker._exchange(agent)
        except TimeoutError:
            raise WorkflowError(
                f"The agent's process was not ready after {timeout_seconds:g} s; what its module does while it is "
                f"imported takes long. {log.output_tail}"
            ) from None
        except _GONE:
            raise WorkflowError(f"The agent's process ended before it was ready. {child.describe_end()}") from None
        if "ready" not in reply:
            await worker.kill()
            raise WorkflowError(f"The agent cannot be made in its process:\n{reply['failure'].strip()}")
        worker.agent_name = reply["ready"]
        return worker

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive, as far as is known."""
        return self._child.is_alive

    @property
    def is_broken(self) -> bool:
        """Whether an exchange was incomplete. The process has been killed then and cannot be used again."""
        return self._is_busy

    async def run(self, data: Any, **extra_kwargs: Any) -> float | dict[InteractionId, float]:
        """Run one episode. Raises ``EpisodeError``; if it is cancelled, the process is killed."""
        check_problem(data)
        request = {
            "data": data,
            "base_url": extra_kwargs["base_url"],
            "api_key": extra_kwargs["api_key"],
            "context": asdict(workflow_context.get()),
        }
        try:
            reply = await self._exchange(request)
        except _GONE:
            raise EpisodeError(f"{self.agent_name}.run lost its process. {self._child.describe_end()}") from None
        if reply["logged"]:
            workflow_context.log(**reply["logged"])
        if "failure" in reply:
            raise EpisodeError(reply["failure"], traceback=reply.get("traceback", ""))
        last = reply["last"]
        return dict(reply["by_interaction"]) if last is None else float(last)

    async def kill(self) -> None:
        """Kill the process and its group."""
        self._is_busy = True
        await self._child.kill()

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line and receive one. Raises one of ``_GONE`` if the process died; any error kills the child."""
        assert self._child.process.stdin is not None
        self._is_busy = True
        try:
            await self._child.process.stdin.send(json.dumps(request).encode() + b"\n")
            reply: dict[str, Any] = json.loads(await self._replies.receive_until(b"\n", _MAX_REPLY_BYTES))
            self._is_busy = False
        finally:
            if self._is_busy:
                await self._child.kill()
        return reply


_MAIN_KEYS = ("init_main_from_name", "init_main_from_path")

_importing: list[str] = []
"""The name of the main program while a child imports it; empty in every other process."""


def serialize_agent(workflow: Any, workflow_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a child needs to create the agent, as JSON. Classes and references are constructed in the child.

    Raises ``WorkflowError`` for objects that cannot be pickled, and if the main program has no guard: a child that
    imports it would start the whole run again.
    """
    if _importing:
        raise WorkflowError(
            f"{_importing[0]} starts a run while it is imported by a child process of a run. Put what it starts below "
            "'if __name__ == \"__main__\":'."
        )
    try:
        pickled = pickle.dumps((workflow, dict(workflow_kwargs or {})))
    except Exception as error:
        name = repr(workflow) if isinstance(workflow, str) else f"The agent {workflow!r}"
        raise WorkflowError(
            f"{name} cannot be handed to a child process: {type(error).__name__}: {error}. Define its "
            "class at the top of a module, name it in the configuration (file.py:Class with workflow_kwargs), make "
            "what cannot be pickled inside run, or use rollout.openai.mode: inline."
        ) from error
    main: Mapping[str, Any] = {}
    if b"__main__" in pickled:
        # A child finds objects defined in ``__main__`` by its name or path, as multiprocessing does.
        found = spawn.get_preparation_data("agent")
        main = {key: found[key] for key in _MAIN_KEYS if key in found}
    return {"pickle": base64.b64encode(pickled).decode(), "main": main}


def deserialize_agent(document: Mapping[str, Any]) -> Agent:
    """Construct the agent in the child. Raises ``WorkflowError``, or any error of importing its module.

    Pickle is only read by a child that this library started, from a pipe that only the parent writes to. Replies of a
    child are JSON (``worker``).
    """
    if document["main"]:
        _importing.append(next(iter(document["main"].values())))
        spawn.prepare(document["main"])
        _importing.clear()
    workflow, kwargs = pickle.loads(base64.b64decode(document["pickle"]))  # noqa: S301 - written by our parent, see the docstring
    return resolve_agent(workflow, workflow_kwargs=kwargs, may_block=True)
