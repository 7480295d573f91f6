"""Transfer of an agent to a child process: by name and arguments if it has them, pickled if it is an object.

Pickle is only read by a child that this library started, from a pipe that only the parent writes to. Replies of a child
are JSON (``worker``).
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
"""The name of the main program while a child imports it; empty in every other process."""


def create_handover(workflow: Any, workflow_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a child needs to create the agent, as JSON. Classes and references are constructed in the child.

    Raises ``WorkflowError`` for objects that cannot be pickled, and if the main program has no guard: a child that
    imports it would start the whole run again.
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
    """Construct the agent in the child. Raises ``WorkflowError``, or any error of importing its module."""
    if document["main"]:
        _importing.append(next(iter(document["main"].values())))
        spawn.prepare(document["main"])
        _importing.clear()
    workflow, kwargs = pickle.loads(base64.b64decode(document["pickle"]))  # noqa: S301 - written by our parent, see the module's docstring
    return resolve_agent(workflow, workflow_kwargs=kwargs, may_block=True)


def _main_program() -> dict[str, Any]:
    """Return how a child finds what is defined in ``__main__``: by its name or path, as multiprocessing does."""
    found: Mapping[str, Any] = spawn.get_preparation_data("agent")
    return {key: found[key] for key in _MAIN_KEYS if key in found}


def _describe(workflow: Any) -> str:
    return repr(workflow) if isinstance(workflow, str) else f"The agent {workflow!r}"
