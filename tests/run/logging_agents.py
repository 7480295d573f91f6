"""Agents that log numbers, for the tests of whole runs."""

from __future__ import annotations

import os

import httpx
from openai import AsyncOpenAI

from areal_actors.workflows import workflow_context

_ASKED = {"model": "policy", "messages": [{"role": "user", "content": "Write digits."}], "max_tokens": 4}


class Logging:
    """Logs inside ``run``; the second member of a group fails after it."""

    async def run(self, data, **extra_kwargs):
        """Ask once, log, and fail or return a reward."""
        async with AsyncOpenAI(base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"]) as client:
            await client.chat.completions.create(**_ASKED)
        context = workflow_context.get()
        workflow_context.log(member=context.member, pid=os.getpid())
        if context.member == 1 and not context.is_eval:
            raise RuntimeError("the second member fails")
        return float(context.member)


class OverHttp:
    """Logs over HTTP, as an agent of any language would."""

    async def run(self, data, **extra_kwargs):
        """Ask once, log twice, and return a reward."""
        async with AsyncOpenAI(base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"]) as client:
            await client.chat.completions.create(**_ASKED)
        url = extra_kwargs["base_url"].removesuffix("/v1") + "/rl/log_metrics"
        member = workflow_context.get().member
        async with httpx.AsyncClient() as client:
            for value in (9.0, member):
                (await client.post(url, json={"metrics": {"member": value}})).raise_for_status()
            refused = await client.post(url, json={"metrics": {"judge": "good"}})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "judge"), refused.text
        return float(member)


class Wrong:
    """Logs what is not a number."""

    async def run(self, data, **extra_kwargs):
        """Log at once."""
        workflow_context.log(judge=float("nan"))
