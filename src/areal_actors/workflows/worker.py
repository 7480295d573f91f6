"""The program of a child process: it creates the agent once, then runs episodes one by one until its parent exits.

The parent writes a line of JSON for each episode to the original standard input, and reads a line from the original
standard output. Both are replaced before the agent's module is imported: the agent's output goes to stderr, which the
parent logs, and its input is empty.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import inspect
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from typing import Any

import httpx

from areal_actors.client import create_agent_http_client
from areal_actors.errors import ArealError, EpisodeError
from areal_actors.workflows import context as workflow_context
from areal_actors.workflows.agents import Agent, Injected, Reward, failure_of, is_failure, parse_result, run_agent
from areal_actors.workflows.context import EpisodeContext
from areal_actors.workflows.pool import deserialize_agent
from areal_actors.workflows.processes import episode_environment


def serve(lifeline: int) -> None:
    """Run a worker until its parent closes the channel."""
    channel = _Channel()

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    # Kills this process group when the pipe ends, on systems whose kernel does not do so (``lib.child_process``).
    threading.Thread(target=watch, name="areal-lifeline", daemon=True).start()
    # A crash in native code leaves the stack of the agent in the log.
    faulthandler.enable()
    try:
        agent = deserialize_agent(next(channel))
    except BaseException as error:  # noqa: BLE001 - any error of the import is reported to the parent, and this process exits
        is_plain = isinstance(error, ArealError) and error.__cause__ is None
        channel.send({"failure": str(error) if is_plain else "".join(traceback.format_exception(error))})
        return
    channel.send({"ready": type(agent).__name__})
    with asyncio.Runner() as loop:
        runner = _EpisodeRunner(agent, loop)
        for request in channel:
            channel.send(runner.run(request))


class _Channel:
    """Lines of JSON from and to the parent, on descriptors that neither the agent nor its children inherit."""

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), "rb")
        self._replies = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        # From now on the agent's output goes to stderr, which the parent logs.
        os.dup2(2, 1)
        if isinstance(sys.stdout, TextIOWrapper):
            # The last lines before a crash explain it.
            sys.stdout.reconfigure(line_buffering=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        line = self._requests.readline()
        if not line.endswith(b"\n"):
            raise StopIteration
        request: dict[str, Any] = json.loads(line)
        return request

    def send(self, reply: Mapping[str, Any]) -> None:
        self._replies.write(json.dumps(reply).encode() + b"\n")
        self._replies.flush()


class _EpisodeRunner:
    """Runs episodes on one event loop, so that connections to the proxy are kept between episodes."""

    def __init__(self, agent: Agent, loop: asyncio.Runner) -> None:
        self._agent = agent
        self._loop = loop
        self._http_client: httpx.AsyncClient | None = None

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to one request: rewards, or the failure.

        The environment is that of the episode meanwhile.
        """
        link = {name: request[name] for name in ("base_url", "api_key")}
        context = EpisodeContext(**request["context"])
        before = dict(os.environ)
        os.environ.update(episode_environment(**link))
        try:
            with workflow_context.enter(context):
                try:
                    reward = self._reward(request["data"], link)
                except EpisodeError as error:
                    traceback.print_exception(error.__cause__ or error)
                    return {"failure": str(error), "traceback": error.traceback, "logged": workflow_context.logged()}
                logged = workflow_context.logged()
        finally:
            # Variables that the episode set are not seen by the next one.
            os.environ.clear()
            os.environ.update(before)
        return {"last": reward.last, "by_interaction": dict(reward.by_interaction), "logged": logged}

    def _reward(self, data: Any, link: Mapping[str, str]) -> Reward:
        if inspect.iscoroutinefunction(self._agent.run):
            # Shared by all episodes, so that certificates are read and connections opened once.
            # An agent may have closed it, as it may close any client that it was given.
            if self._http_client is None or self._http_client.is_closed:
                self._http_client = create_agent_http_client()
            injected = Injected(**link, http_client=self._http_client)

            async def run() -> Reward:
                try:
                    return await run_agent(self._agent, data, injected)
                finally:
                    # Tasks that an episode left would otherwise send requests in the name of the next one.
                    others = asyncio.all_tasks() - {asyncio.current_task()}
                    for task in others:
                        task.cancel()
                    await asyncio.gather(*others, return_exceptions=True)

            return self._loop.run(run(), context=contextvars.copy_context())
        try:
            result: Any = self._agent.run(data, **link)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise failure_of(f"{type(self._agent).__name__}.run", error) from error
        return parse_result(result, agent=type(self._agent).__name__)
