"""From what a configuration or a caller names to an agent that can run.

A workflow may be an instance, a class (with keyword arguments), a dotted name (``package.module.Class``) or a file
and a name (``agents/tool.py:ToolAgent``, relative to the configuration). Only what the person who starts the run
wrote is imported: nothing that arrives over HTTP comes near this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_actors.errors import WorkflowError
from areal_actors.workflows.agents import Agent
from areal_actors.workflows.rollout import RolloutWorkflow

__all__ = ["import_reference", "resolve_agent", "resolve_workflow"]


def resolve_agent(
    workflow: Any,
    *,
    workflow_kwargs: Mapping[str, Any] | None = None,
    directory: Path | None = None,
    may_block: bool = False,
) -> Agent:
    """The agent that ``workflow`` means. Raises ``WorkflowError`` saying what was found instead.

    A plain ``def run`` will do where it ``may_block``: in a process of its own.
    """
    return _checked(_build(workflow, workflow_kwargs, directory), workflow, may_block=may_block)


def resolve_workflow(
    workflow: Any, *, workflow_kwargs: Mapping[str, Any] | None = None, directory: Path | None = None
) -> Agent | RolloutWorkflow:
    """The agent or the rollout workflow that ``workflow`` means. Raises ``WorkflowError`` if it is neither."""
    target = _build(workflow, workflow_kwargs, directory)
    return target if isinstance(target, RolloutWorkflow) else _checked(target, workflow, may_block=False)


def _build(workflow: Any, workflow_kwargs: Mapping[str, Any] | None, directory: Path | None) -> Any:
    """The object that ``workflow`` names, is, or is made of."""
    kwargs = dict(workflow_kwargs or {})
    target = import_reference(workflow, directory=directory) if isinstance(workflow, str) else workflow
    if inspect.isclass(target):
        target = _construct(target, kwargs)
    elif kwargs:
        raise WorkflowError(
            f"workflow_kwargs {sorted(kwargs)} were given with {_describe(workflow)}, which is built already; "
            "pass its class, or leave them out."
        )
    return target


def import_reference(reference: str, *, directory: Path | None = None) -> Any:
    """The object behind ``file.py:name``, ``module:name`` or ``package.module.name``.

    Raises ``WorkflowError`` with the step that failed: no such file, an import that raised, no such name.
    """
    if reference.endswith(".py"):
        raise WorkflowError(f"{reference!r} names a file; say what in it: '{reference}:Class'.")
    module_name, _, name = reference.partition(":") if ":" in reference else reference.rpartition(".")
    if not module_name or not name:
        raise WorkflowError(f"{reference!r} names nothing; write 'file.py:Class' or 'package.module.Class'.")
    module = _import_file(module_name, directory) if module_name.endswith(".py") else _import_module(module_name)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            known = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))[:12])
            raise WorkflowError(f"{module_name} has no {name!r}; it has: {known}.")
        target = getattr(target, part)
    return target


def _import_file(name: str, directory: Path | None) -> ModuleType:
    path = (directory or Path.cwd()).joinpath(name).resolve()
    if not path.is_file():
        raise WorkflowError(f"There is no file {path}; paths of workflows are relative to the configuration file.")
    # The name holds the whole path, so that two agent.py of two directories are two modules, and pickling finds either.
    module_name = f"areal_workflow_{path.stem}_{blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise WorkflowError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise WorkflowError(f"Importing {path} raised {type(error).__name__}: {error}") from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WorkflowError(f"Cannot import {name}: {error}. Is it installed, and on PYTHONPATH?") from error
    except Exception as error:
        raise WorkflowError(f"Importing {name} raised {type(error).__name__}: {error}") from error


def _construct(target: type, kwargs: dict[str, Any]) -> Any:
    try:
        return target(**kwargs)
    except TypeError as error:
        raise WorkflowError(f"{target.__name__}({', '.join(sorted(kwargs))}) does not fit: {error}") from error
    except Exception as error:
        summary = f"{type(error).__name__}: {error}"
        raise WorkflowError(f"{target.__name__}({', '.join(sorted(kwargs))}) raised {summary}") from error


def _checked(target: Any, workflow: Any, *, may_block: bool) -> Agent:
    run = getattr(target, "run", None)
    if not (inspect.iscoroutinefunction(run) or (may_block and callable(run))):
        found = "no method 'run'" if run is None else "a 'run' that is not 'async def'"
        way_out = "; one that blocks needs rollout.openai.mode: subprocess" if callable(run) else ""
        raise WorkflowError(
            f"{_describe(workflow)} has {found}; an agent has 'async def run(self, data, **extra_kwargs)'{way_out}, "
            "and a rollout workflow is a subclass of RolloutWorkflow."
        )
    agent: Agent = target
    return agent


def _describe(workflow: Any) -> str:
    return repr(workflow) if isinstance(workflow, str) else f"{type(workflow).__name__} {workflow!r}"
