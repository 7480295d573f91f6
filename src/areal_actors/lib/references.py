"""Python objects named in a configuration: ``file.py:name``, ``module:name`` or ``package.module.name``.

Agents, problems, and the functions that extend a run (``extensions``) are named in this form. Only references written
by the person who starts the run are imported; input that arrives over HTTP never reaches this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, NewType

from attrs import field, frozen

from areal_actors.errors import ArealError, CustomFunctionError, WorkflowError

_MAX_SHOWN = 80

FunctionReference = NewType("FunctionReference", str)
"""The name of a built-in function, or ``/absolute/file.py:name``, ``module:name`` or ``package.module.name``."""


def is_reference(text: str) -> bool:
    """Return whether ``text`` has the form of a path to an object.

    Names of built-in functions contain no ``:`` and no ``.``.
    """
    return ":" in text or "." in text


def builtin_or_reference(names: Iterable[str]) -> Callable[[object, object, object], None]:
    """Return a validator that accepts one of ``names``, a member of an enum, or text with the form of a reference."""
    known = [str(name) for name in names]

    def validate(_: object, __: object, value: object) -> None:
        if isinstance(value, Enum) or value in known or (isinstance(value, str) and is_reference(value)):
            return
        close = get_close_matches(str(value), known, n=1, cutoff=0.6)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"must be one of {', '.join(known)}, or a function as file.py:name, not {value!r}{meant}")

    return validate


def import_reference(
    reference: str, *, directory: Path | None = None, error: type[ArealError] = WorkflowError, kind: str = "Class"
) -> Any:
    """Import the object behind ``file.py:name``, ``module:name`` or ``package.module.name``.

    Raises ``error`` with the step that failed: a missing file, an import that raised, or a missing name. ``kind`` is
    the placeholder for the name in messages about an incomplete reference.
    """
    if reference.endswith(".py"):
        raise error(f"{reference!r} names a file; say what in it: '{reference}:{kind}'.")
    module_name, _, name = reference.partition(":") if ":" in reference else reference.rpartition(".")
    if not module_name or not name:
        raise error(f"{reference!r} names nothing; write 'file.py:{kind}' or 'package.module.{kind}'.")
    if module_name.endswith(".py"):
        module = _import_file(module_name, directory, error)
    else:
        try:
            module = importlib.import_module(module_name)
        except ImportError as failure:
            raise error(f"Cannot import {module_name}: {failure}. Is it installed, and on PYTHONPATH?") from failure
        except Exception as failure:
            raise error(f"Importing {module_name} raised {type(failure).__name__}: {failure}") from failure
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = [n for n in vars(module) if not n.startswith("_")]
            close = get_close_matches(name, names, n=1, cutoff=0.6)
            meant = f"; did you mean {close[0]}?" if close else "."
            raise error(f"{module_name} has no {name!r}; it has: {', '.join(sorted(names)[:12])}{meant}")
        target = getattr(target, part)
    return target


def _import_file(name: str, directory: Path | None, error: type[ArealError]) -> ModuleType:
    path = (directory or Path.cwd()).joinpath(name).resolve()
    if not path.is_file():
        raise error(
            f"There is no file {path}; paths in a configuration are relative to its file, those on the command line to "
            "the working directory."
        )
    # The name depends on the whole path: two agent.py in two directories are two modules, and pickle finds both.
    module_name = f"areal_workflow_{path.stem}_{blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise error(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Like a script, the file can import the modules beside it. At the end, so that a random.py there hides nothing.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Before the module runs: dataclasses and pickle look it up by its name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    # A file that calls sys.exit() when it is imported must not end the run.
    except (Exception, SystemExit) as failure:
        del sys.modules[module_name]
        hint = ""
        if isinstance(failure, ModuleNotFoundError):
            hint = f"; install the package that has {failure.name} for {sys.executable}, which runs this"
        raise error(f"Importing {path} raised {type(failure).__name__}: {failure}{hint}") from failure
    return module


# ------------------------------------------------------------------------------------------- custom functions


@frozen(kw_only=True)
class CustomFunction:
    """A function that the configuration names: a reward rule, an advantage estimator, a policy loss or a metric.

    ``name`` is its name in messages, such as ``my_rule.py:best_continuation``.
    """

    name: str
    function: Callable[..., Any] = field(eq=False)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. Raises ``CustomFunctionError`` with the function's exception as its cause."""
        try:
            return self.function(*arguments)
        except (ArealError, OverflowError):
            raise
        except Exception as error:
            changes = any(hint in str(error) for hint in _CHANGES)
            advice = " It must not change what it is given; work on a copy." if changes else ""
            raise self.complaint(f"raised {type(error).__name__}: {error}.{advice}") from error

    def complaint(self, text: str) -> CustomFunctionError:
        """Return an error whose message is ``text``, preceded by the function's name."""
        return CustomFunctionError(f"{self.name} {text}")


_CHANGES = ("does not support item assignment", "read-only", "FrozenInstanceError", "can't set attribute")
"""Parts of the messages with which Python, numpy and attrs reject a change to a frozen value."""


def load_function(reference: str) -> CustomFunction:
    """Import a function. Raises ``CustomFunctionError`` if it cannot be imported, or cannot be called directly."""
    target = import_reference(reference, error=CustomFunctionError, kind="function")
    file, colon, name = reference.rpartition(":")
    found = CustomFunction(name=f"{Path(file).name}:{name}" if colon else reference, function=target)
    if not callable(target):
        raise found.complaint(f"is a {type(target).__name__}, which cannot be called; name a function.")
    if inspect.isclass(target):
        raise found.complaint("is a class; name a function, or an instance that can be called.")
    if inspect.iscoroutinefunction(target):
        raise found.complaint("is 'async def'; it is called between other computations, and must be a plain 'def'.")
    return found


def shorten(value: object) -> str:
    """Return the ``repr`` of a function's result, shortened for messages."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
