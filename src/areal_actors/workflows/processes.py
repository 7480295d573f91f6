"""Inputs of agent processes: variables with which SDKs find the proxy, and problems as JSON.

``lib.child_process`` runs the processes; ``pool`` and ``commands`` communicate with them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from areal_actors.errors import EpisodeError

_SECRETS = frozenset({"AREAL_ADMIN_KEY", "AREAL_API_KEY", "AREAL_BOOTSTRAP"})
"""Variables of the run that authorise more than an agent may do: access to any session, and the run's own workers."""


def inherited_environment() -> dict[str, str]:
    """Return the environment of this process without the keys of the run."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS}


def episode_environment(*, base_url: str, api_key: str) -> dict[str, str]:
    """Return the variables in which SDKs look for their base URL and key.

    OpenAI's URL ends in ``/v1``, Anthropic's does not.
    """
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


def check_problem(value: object, *, path: str = "data") -> None:
    """Raise ``EpisodeError`` naming the part of a problem that JSON cannot represent unchanged."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise EpisodeError(
                    f"{path} has the key {key!r}; a problem that goes to another process has keys of text."
                )
            check_problem(item, path=f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_problem(item, path=f"{path}[{number}]")
    elif not (value is None or isinstance(value, str | int | float)):
        raise EpisodeError(
            f"{path} is a {type(value).__name__}, which cannot go to another process: a problem there is made of text, "
            "numbers, lists and mappings. Make it there, or run the agent with rollout.openai.mode: inline."
        )
