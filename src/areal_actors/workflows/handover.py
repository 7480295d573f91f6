"""How an agent gets into a child process: by name and arguments where it has them, pickled where it is an object.

Pickle is read by a child that we started, from a pipe that only we write to, and nowhere else. What comes back from a
child is JSON (``worker``).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from multiprocessing import spawn
from typing import Any

from areal_actors.errors import WorkflowError
from areal_actors.workflows.agents import Agent
from areal_actors.workflows.resolve import resolve_agent

__all__ = ["create_handover", "receive_agent"]

_MAIN_KEYS = ("init_main_from_name", "init_main_from_path")

_importing: list[str] = []
"""Holds the name of the main program while a child imports it, and is empty in every other process."""


def create_handover(workflow: Any, workflow_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a child needs to make the agent, as JSON. A class and a reference are constructed there, not here.

    Raises ``WorkflowError`` for what cannot be pickled, and where the main program has no guard: a child that imports
    it would start the whole run again.
    """
    if _importing:
        raise WorkflowError(
            f"{_importing[0]} starts a run while it is imported by a child process of a run. Put what it starts below "
            "'if __name__ == \"__main__\":'."
        )
    try:
        parcel = pickle.dumps((workflow, dict(workflow_kwargs or {})))
    except Exception as error:
        raise WorkflowError(
            f"{_describe(workflow)} cannot be handed to a child process: {type(error).__name__}: {error}. Define its "
            "class at the top of a module, name it in the configuration (file.py:Class with workflow_kwargs), make "
            "what cannot be pickled inside run, or use rollout.openai.mode: inline."
        ) from error
    return {"pickle": base64.b64encode(parcel).decode(), "main": _main_program() if b"__main__" in parcel else {}}


def receive_agent(document: Mapping[str, Any]) -> Agent:
    """In the child: the agent, constructed. Raises ``WorkflowError``, or whatever importing its module raises."""
    if document["main"]:
        _importing.append(next(iter(document["main"].values())))
        spawn.prepare(document["main"])
        _importing.clear()
    workflow, kwargs = pickle.loads(base64.b64decode(document["pickle"]))  # noqa: S301 - our parent's, see above
    return resolve_agent(workflow, workflow_kwargs=kwargs, may_block=True)


def _main_program() -> dict[str, Any]:
    """How a child finds what is defined in ``__main__``: as multiprocessing does, by the name or the path of it."""
    found: Mapping[str, Any] = spawn.get_preparation_data("agent")
    return {key: found[key] for key in _MAIN_KEYS if key in found}


def _describe(workflow: Any) -> str:
    return repr(workflow) if isinstance(workflow, str) else f"The agent {workflow!r}"
