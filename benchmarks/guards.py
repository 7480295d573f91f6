"""What keys, roles and digests cost a turn: the complete proxy, with them and without, by turns in one process.

Each session has a key that controls it, one that completes, and keys of two roles; each turn has a digest. Without
them, a session has the one key that completes, no key has a role, and nothing is hashed. The server changes between the
two with every conversation, so that what the machine does meanwhile meets both.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
from collections.abc import Mapping
from typing import Any

import anyio
from benchmarks.floors import ADMIN_KEY, serve_as_the_proxy, served, tell_cpu
from benchmarks.harness import Result
from benchmarks.load import Connection, server_process
from benchmarks.null_engine import SETUPS, NullEngine
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from areal_actors.cache import session as keys
from areal_actors.cache import tree
from areal_actors.kernel import ActorSystem
from areal_actors.lib.gc_tuning import tuned_gc
from areal_actors.messages import OpenSession
from areal_actors.proxy import ProxyConfig, create_app
from areal_actors.rollouts.staleness import CapacityLimits
from areal_actors.run.inference import InferenceConfig, spawn_generation, spawn_session_actors

_GATE = 1.0
"""Percent of the CPU time of a turn."""
_ROLES = ("judge", "user")
_NUM_TURNS = 25


class _NoHash:
    """Stands for the hash of ids."""

    def copy(self) -> _NoHash:
        return self

    def update(self, _: bytes) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


def _has_only_key(session: keys.Session, digest: bytes) -> bool:
    return hmac.compare_digest(session.completion_digest, digest)


_WITHOUT: tuple[tuple[Any, str, Any], ...] = (
    (keys, "_opens", _has_only_key),
    (keys.Session, "role_of_key", lambda *_: None),
    (tree, "create_token_hash", _NoHash),
    (tree, "digest_turn", lambda *_: ""),
)
"""Owners, names and stand-ins of the functions that this measures."""


async def _serve() -> None:
    """Serve until the standard input is closed; ``/guards/0`` and ``/guards/1`` switch between the two."""
    setup = SETUPS["idle"]
    renderer = setup.create_renderer()
    parts = [(owner, name, getattr(owner, name), stand_in) for owner, name, stand_in in _WITHOUT]

    async def switch(request: Request) -> Response:
        for owner, name, real, stand_in in parts:
            setattr(owner, name, real if request.path_params["on"] else stand_in)
        return PlainTextResponse("0")

    async with ActorSystem.open() as system:
        generation = await spawn_generation(system, NullEngine(renderer, setup))
        settings = InferenceConfig(limits=CapacityLimits(max_concurrent=2**30, batch_size=2**30))
        actors = await spawn_session_actors(system, settings, renderer=renderer, generation=generation)
        config = ProxyConfig(admin_key=ADMIN_KEY)
        app = create_app(sessions=actors.sessions, exports=actors.exports, capacity=actors.capacity, config=config)
        app.router.routes.extend([Route("/cpu", tell_cpu), Route("/guards/{on:int}", switch)])
        opened = await actors.sessions.ask(OpenSession(task="guards", roles=_ROLES))
        issued = {"the agent": opened.completion_key, "a role": opened.role_keys[_ROLES[-1]]}
        async with served(app, serve_as_the_proxy) as url:
            with tuned_gc():
                print(json.dumps({"url": url, "session": opened.session, "keys": issued}), flush=True)
                await anyio.to_thread.run_sync(sys.stdin.read)


async def _measure(server: Mapping[str, Any], *, num_rounds: int) -> dict[tuple[str, int], list[float]]:
    """Server CPU in microseconds per turn, by key and by whether keys, roles and digests are on, of each round."""
    connection = await Connection(server["url"]).open()
    figures: dict[tuple[str, int], list[float]] = {(key, on): [] for key in server["keys"] for on in (0, 1)}

    async def converse(key: str, opening: str) -> float:
        messages = [{"role": "user", "content": opening}]
        before = await connection.get("/cpu")
        for _ in range(_NUM_TURNS):
            body = {"model": "m", "messages": messages}
            answer = await connection.post(f"/{server['session']}/v1/chat/completions", body, key=key)
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
        return float(await connection.get("/cpu") - before) / _NUM_TURNS * 1e6

    try:
        for number in range(num_rounds):
            for key, on in sorted(figures, reverse=bool(number % 2)):
                await connection.get(f"/guards/{on}")
                figures[key, on].append(await converse(server["keys"][key], f"Round {number}, {key}, {on}."))
    finally:
        connection.close()
    return figures


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """The CPU time of a turn with the agent's key and with a role's, with and without, and the share."""
    with server_process("benchmarks.guards", "serve") as server:
        figures = asyncio.run(_measure(server, num_rounds=10 if quick else 300))
    # The lower decile: what others do on the machine only adds, and one round alone is too short for a minimum.
    least = {which: sorted(costs)[len(costs) // 10] for which, costs in figures.items()}
    results = []
    for key in server["keys"]:
        for on, words in ((1, ""), (0, ", one key and no digests")):
            name = f"turn with the key of {key}{words}"
            results.append(Result(benchmark="guards", name=name, value=least[key, on], unit="µs/turn"))
        share = (least[key, 1] / least[key, 0] - 1) * 100
        # A few rounds are too noisy for one percent.
        gate = None if quick else _GATE
        results.append(Result(benchmark="guards", name=f"share, key of {key}", value=share, unit="%", gate=gate))
    return results


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        anyio.run(_serve)
    else:
        for result in run(quick="--quick" in sys.argv):
            print(f"{result.name:40} {result.value:9.2f} {result.unit}")
