"""Terminus 2 of Harbor 0.26.0: pip install harbor==0.26.0 (Python 3.12 or later), apt-get install tmux.

Chat completions, through LiteLLM: the base URL (with /v1) and the key are arguments. Its terminal is tmux where this
runs, instead of a container of its benchmark.
Usage: terminus.py PROMPT
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class Here:
    """As much of Harbor's environment as the agent uses: commands run here, as this user."""

    default_user = None
    session_id = "here"

    async def exec(self, command: str, **_: Any) -> ExecResult:
        """Run a command to its end."""
        process = await asyncio.create_subprocess_exec("bash", "-c", command, stdout=PIPE, stderr=PIPE)
        stdout, stderr = await process.communicate()
        return ExecResult(stdout=stdout.decode(), stderr=stderr.decode(), return_code=process.returncode or 0)


async def main() -> None:
    """Send the prompt, and run the agent to its end."""
    with TemporaryDirectory() as logs:
        # A socket of its own: the agent's session has a fixed name, and several agents may run here.
        os.environ["TMUX_TMPDIR"] = logs
        agent = Terminus2(
            logs_dir=Path(logs),
            model_name="openai/policy",
            api_base=os.environ["OPENAI_BASE_URL"],
            llm_kwargs={"api_key": os.environ["OPENAI_API_KEY"]},
            model_info={"max_input_tokens": 32_000, "max_output_tokens": 4_000},
            enable_summarize=False,
            record_terminal_session=False,
        )
        here: Any = Here()
        try:
            await agent.setup(here)
            await agent.run(sys.argv[1], here, AgentContext())
        finally:
            await here.exec("tmux kill-server")


if __name__ == "__main__":
    asyncio.run(main())
