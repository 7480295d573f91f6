"""OpenHands 1.58.2: pip install openhands-sdk==1.58.2 openhands-tools==1.58.2 (Python 3.12).

Chat completions, through LiteLLM: the base URL (with /v1) and the key are arguments of ``LLM``.
Usage: openhands_sdk.py PROMPT [--continue [--condense]]: with the conversation so far, or with its summary.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from uuid import UUID

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}

from openhands.sdk import LLM, Agent, Conversation
from openhands.tools.preset.default import get_default_condenser, get_default_tools, register_builtins_agents

STATE = Path.home() / ".openhands" / "conversations"
CONVERSATION = UUID(int=1)  # the only one of this home


def main() -> None:
    """Send the prompt, and run the agent to its end."""
    prompt, *options = sys.argv[1:]
    if "--continue" not in options:
        shutil.rmtree(STATE, ignore_errors=True)
    llm = LLM(
        model="openai/policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        api_mode="chat",
        stream=True,
        reasoning_effort=None,
        retry_min_wait=1,  # seconds before a refused request is sent again; 8 otherwise
        retry_multiplier=1,
    )
    register_builtins_agents(enable_browser=False)
    agent = Agent(
        llm=llm,
        tools=get_default_tools(enable_browser=False, enable_sub_agents=True),
        system_prompt_kwargs={"cli_mode": True},
        condenser=get_default_condenser(llm.model_copy(update={"usage_id": "condenser"})),
    )
    conversation = Conversation(
        agent,
        workspace=Path.cwd(),
        persistence_dir=STATE,
        conversation_id=CONVERSATION,
        token_callbacks=[lambda _: None],  # without one, nothing can be streamed
        delete_on_close=False,
    )
    if "--condense" in options:
        conversation.condense()
    conversation.send_message(prompt)
    conversation.run()
    conversation.close()


if __name__ == "__main__":
    main()
