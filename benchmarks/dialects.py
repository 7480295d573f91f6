"""Long conversations by each protocol: what a turn costs the proxy by ``/messages`` and ``/responses``, beside chat.

The three conversations are the same one, written as the protocols' own SDKs write it, and take turns at one server. By
``/messages`` it is also written as coding agents write it, whose marks of what to cache move on with each turn.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from attrs import frozen
from benchmarks.floors import ADMIN_KEY
from benchmarks.harness import Result
from benchmarks.load import Connection, serving

_TURNS = {1: 40, 200: 1}
"""Conversations per round, by their number of turns."""
_GATE = 1.1
_TOOLS = 12
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "Absolute, with slashes. " * 8}}}

Body = dict[str, Any]


@frozen(kw_only=True)
class Protocol:
    """How a conversation is written: its path, and the body that asks after so many messages."""

    path: str
    question: Callable[[str], Body]
    echo: Callable[[Any], list[Body]]
    """The messages of an answer."""
    write: Callable[[list[Body]], Body]


def _say(text: str) -> Body:
    return {"role": "user", "content": text}


def _say_in_blocks(text: str) -> Body:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def _write_marked(messages: list[Body]) -> Body:
    """As Claude Code does: the last two questions are marked, so that the bytes of older ones change."""
    marked = list(messages)
    for index in [i for i, message in enumerate(messages) if message["role"] == "user"][-2:]:
        *blocks, last = messages[index]["content"]
        marked[index] = {"role": "user", "content": [*blocks, {**last, "cache_control": {"type": "ephemeral"}}]}
    tools = [{"name": f"tool{n}", "description": "Reads a file. " * 20, "input_schema": _SCHEMA} for n in range(_TOOLS)]
    system = [{"type": "text", "text": "You are an agent. " * 50, "cache_control": {"type": "ephemeral"}}]
    return {"model": "m", "messages": marked, "system": system, "tools": tools, "max_tokens": 512}


def _write_chat_of_agent(messages: list[Body]) -> Body:
    tools = [
        {
            "type": "function",
            "function": {"name": f"tool{n}", "description": "Reads a file. " * 20, "parameters": _SCHEMA},
        }
        for n in range(_TOOLS)
    ]
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "You are an agent. " * 50}, *messages],
        "tools": tools,
    }


def _write_chat(messages: list[Body]) -> Body:
    return {"model": "m", "messages": messages}


def _echo_chat(answer: Any) -> list[Body]:
    return [{"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]


PROTOCOLS = {
    "chat": Protocol(path="chat/completions", question=_say, echo=_echo_chat, write=_write_chat),
    "messages": Protocol(
        path="messages",
        question=_say,
        echo=lambda answer: [{"role": "assistant", "content": answer["content"]}],
        write=lambda messages: {"max_tokens": 512, "messages": messages, "model": "m"},
    ),
    "responses": Protocol(
        path="responses",
        question=_say,
        echo=lambda answer: answer["output"],
        write=lambda messages: {"input": messages, "model": "m"},
    ),
    "chat of an agent with tools": Protocol(
        path="chat/completions", question=_say, echo=_echo_chat, write=_write_chat_of_agent
    ),
    "messages of an agent with tools": Protocol(
        path="messages",
        question=_say_in_blocks,
        echo=lambda answer: [{"role": "assistant", "content": answer["content"]}],
        write=_write_marked,
    ),
}
_BASELINES = {
    "messages": "chat",
    "responses": "chat",
    "messages of an agent with tools": "chat of an agent with tools",
}


def run(quick: bool) -> list[Result]:  # noqa: FBT001 - the protocol of all benchmarks
    """Server CPU per turn of conversations of 1 and 200 turns, and the ratios to chat; the least of several rounds."""
    rounds = 3 if quick else 9
    least: dict[tuple[str, int], float] = {}
    with serving("proxy", "idle") as urls:
        for _ in range(rounds):
            for num_turns, num_conversations in _TURNS.items():
                for name, protocol in PROTOCOLS.items():
                    cost = asyncio.run(_measure(urls[0], protocol, num_turns, num_conversations))
                    least[name, num_turns] = min(cost, least.get((name, num_turns), cost))
    results = [
        Result(benchmark="dialects", name=_title(name, turns), value=value, unit="µs/turn")
        for (name, turns), value in least.items()
    ]
    ratios = [
        Result(
            benchmark="dialects",
            name=f"{name} against {baseline}, conversation of {turns}",
            value=least[name, turns] / least[baseline, turns],
            unit="ratio",
            gate=_GATE if turns > 1 else None,
            baseline=_title(baseline, turns),
        )
        for name, baseline in _BASELINES.items()
        for turns in _TURNS
    ]
    return results + ratios


def _title(name: str, num_turns: int) -> str:
    return f"{name}, conversation of {num_turns}"


async def _measure(url: str, protocol: Protocol, num_turns: int, num_conversations: int) -> float:
    """Server CPU in microseconds per turn."""
    connection = await Connection(url).open()
    try:
        spent = 0.0
        for _ in range(num_conversations):
            opened = await connection.post("/rl/start_session", {"task_id": "long"}, key=ADMIN_KEY)
            before = await connection.get("/cpu")
            messages = [protocol.question("Let us talk for long.")]
            for _ in range(num_turns):
                path = f"/{opened['session_id']}/v1/{protocol.path}"
                answer = await connection.post(path, protocol.write(messages))
                messages += [*protocol.echo(answer), protocol.question("Go on.")]
            spent += await connection.get("/cpu") - before
    finally:
        connection.close()
    return spent / num_conversations / num_turns * 1e6


if __name__ == "__main__":
    for result in run(quick="--quick" in sys.argv):
        print(f"{result.name:80} {result.value:9.2f} {result.unit}")
