"""The agent for problems in BFCL's format: ``areal_actors.workflows.bfcl.FunctionCaller``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from areal_actors.datasets.bfcl import FunctionCall, find_fault

__all__ = ["FunctionCaller"]


@frozen(kw_only=True)
class FunctionCaller:
    """Asks once, with the problem's functions as tools. The reward is 1 if the calls are right, and 0 otherwise."""

    system_prompt: str = ""
    temperature: float = 1.0
    max_tokens: int | None = None

    async def run(self, data: Mapping[str, Any], **extra_kwargs: Any) -> float:
        """Answer one problem, and return the reward. Raises ``HTTPStatusError`` if the model refuses the request."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        answer = await extra_kwargs["http_client"].post(
            f"{extra_kwargs['base_url']}/chat/completions",
            headers={"Authorization": f"Bearer {extra_kwargs['api_key']}"},
            json={
                "model": "policy",
                "messages": [*system, *data["messages"]],
                "tools": data["tools"],
                "temperature": self.temperature,
                **limit,
            },
        )
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        calls = []
        for function in (call["function"] for call in message.get("tool_calls") or ()):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                arguments = None
            calls.append(FunctionCall(function["name"], arguments if isinstance(arguments, dict) else None))
        return float(find_fault(data, calls) is None)
