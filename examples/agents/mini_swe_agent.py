"""mini-swe-agent 2.4.6 in child processes, on a task that a tiny model can learn: print digits.

The agent, its tool and its loop are those of the package: pip install mini-swe-agent==2.4.6 mcp==2.3.0
Only its prompt is replaced by a short one. The commands of the model run in bubblewrap, without a network.
"""

from __future__ import annotations

import os
import string
from typing import Any

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment, BubblewrapEnvironmentConfig
from minisweagent.models.litellm_model import LitellmModel

ISOLATED = [*BubblewrapEnvironmentConfig().wrapper_args, "--unshare-pid", "--unshare-net", "--die-with-parent"]


class MiniSweAgent:
    """Runs mini-swe-agent on one problem, for one command of the model."""

    def __init__(self, max_tokens: int = 64) -> None:
        self.max_tokens = max_tokens

    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:  # noqa: ARG002 - the client reads its environment
        """Return the share of digits in what the command printed.

        LiteLLM finds the model by OPENAI_BASE_URL and OPENAI_API_KEY.
        """
        model = LitellmModel(
            model_name="openai/policy",
            model_kwargs={"max_tokens": self.max_tokens, "temperature": 1.0},
            cost_tracking="ignore_errors",
            observation_template="{{ output.output }}",
        )
        environment = BubblewrapEnvironment(wrapper_args=ISOLATED, timeout=5)
        agent = DefaultAgent(
            model,
            environment,
            system_template="You use bash.",
            instance_template="{{ task }}",
            step_limit=1,
            max_consecutive_format_errors=1,
        )
        agent.run(data["task"])
        printed = "".join(message["content"] for message in agent.messages if message["role"] == "tool").strip()
        return sum(character in string.digits for character in printed) / max(len(printed), 1)
