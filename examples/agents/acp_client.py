"""Agents that speak the Agent Client Protocol, as an editor starts them; for Python 3.10 and later, without packages.

The agent is a child process that answers JSON-RPC on its standard streams: ``qwen --acp`` (@qwen-code/qwen-code@0.24.4,
with which this was run), ``opencode acp`` and others.
It runs its tools itself, here without asking. Its base URL and key go where its own recipe puts them.
Usage: acp_client.py PROMPT COMMAND ... [--continue]: with the session so far, where the agent can load one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

LAST_SESSION = Path.home() / ".acp-session"


class Agent:
    """The agent's process. Requests are answered in order; what it asks meanwhile is answered here."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._last = 0

    def send(self, message: dict[str, Any]) -> None:
        """Write a message."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a request, and return its result."""
        self._last += 1
        self.send({"id": self._last, "method": method, "params": params})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "method" in message:
                self._answer(message)
            elif message.get("id") == self._last:
                if "error" in message:
                    sys.exit(f"{method}: {message['error']}")
                return message["result"] or {}
        sys.exit(f"The agent ended during {method}.")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()

    def _answer(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "session/request_permission":
            allowed = next(one for one in params["options"] if one["kind"].startswith("allow"))
            outcome = {"outcome": "selected", "optionId": allowed["optionId"]}
            self.send({"id": message["id"], "result": {"outcome": outcome}})
        elif "id" in message:
            error = {"code": -32601, "message": "This client has neither files nor terminals."}
            self.send({"id": message["id"], "error": error})
        elif params.get("update", {}).get("sessionUpdate") == "agent_message_chunk":
            print(params["update"]["content"].get("text", ""), end="", flush=True)


def main() -> None:
    """Send the prompt, and print the answer."""
    prompt, *command = sys.argv[1:]
    is_continued = "--continue" in command
    agent = Agent([word for word in command if word != "--continue"])
    agent.ask("initialize", protocolVersion=1, clientCapabilities={}, clientInfo={"name": "acp", "version": "1"})
    place = {"cwd": str(Path.cwd()), "mcpServers": []}
    if is_continued:
        session = LAST_SESSION.read_text(encoding="utf-8")
        agent.ask("session/load", sessionId=session, **place)
    else:
        session = agent.ask("session/new", **place)["sessionId"]
        LAST_SESSION.write_text(session, encoding="utf-8")
    # As an editor's button does: the agent ends its turn, and answers the prompt.
    signal.signal(signal.SIGINT, lambda *_: agent.send({"method": "session/cancel", "params": {"sessionId": session}}))
    ended = agent.ask("session/prompt", sessionId=session, prompt=[{"type": "text", "text": prompt}])
    print(f"\n{ended['stopReason']}")
    agent.close()


if __name__ == "__main__":
    main()
