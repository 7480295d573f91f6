"""Tasksets of the library verifiers as sources of problems (``{verifiers: gsm8k}``), and how its plugins are found.

A taskset or a harness is named by the id of an installed package, as verifiers itself does, or by a class:
``file.py:Class`` or ``module:Class``. Problems are the data of its tasks, which an agent (``verifiers``)
converts back to tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from hashlib import blake2b
from inspect import isclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from attrs import field, frozen

from areal_actors.datasets import DatasetConfig, ProblemsReference, Rows, plain_row
from areal_actors.errors import ArealError, DatasetError
from areal_actors.lib.references import import_reference

INSTALL = "pip install 'areal-actors-environments[verifiers]'"


@frozen(kw_only=True)
class VerifiersPlugin:
    """A taskset or a harness of verifiers: its name, and its options; or only its name."""

    short_form: ClassVar[str] = "id"

    id: ProblemsReference
    """The id of an installed package, file.py:Class or module:Class."""
    options: Mapping[str, Any] = field(factory=dict)
    """Settings of its configuration class."""

    @property
    def source(self) -> str:
        """The id of a taskset."""
        return str(self.id)

    def load(self, config: DatasetConfig, directory: Path) -> Rows:  # noqa: ARG002 - ids have no directory
        """Return the problems of the taskset. Raises ``DatasetError`` if it cannot be loaded."""
        made = task_rows(self, config.size and config.num_made, num_made=config.num_made)
        return [plain_row(row, f"{self.id}, problem {number}") for number, row in enumerate(made)]


def import_verifiers(error: type[ArealError] = DatasetError) -> Any:
    """Return the module ``verifiers.v1``. Raises ``error`` with the line that installs it."""
    try:
        import verifiers.v1  # pyright: ignore[reportMissingImports] - optional
    except ImportError as failure:
        # An older release has no v1, and one that was forced next to openai 3 does not import.
        reason = "" if isinstance(failure, ModuleNotFoundError) and failure.name == "verifiers" else f" ({failure})"
        raise error(
            f"Environments of verifiers need the package verifiers 0.4{reason}; run: {INSTALL}. It requires openai "
            "below 3, so give it an environment without the extra recipes."
        ) from failure
    return verifiers.v1


def plugin_id(reference: str, base: type, *, error: type[ArealError] = DatasetError) -> str:
    """Return the id by which verifiers imports the plugin that ``reference`` names.

    A class is made available under a module name of its own, as a package would export it. Raises ``error`` if it
    cannot be imported or is not a subclass of ``base``.
    """
    if ":" not in reference and not reference.endswith(".py"):
        return reference
    found = import_reference(reference, error=error)
    if not (isclass(found) and issubclass(found, base)):
        raise error(f"{reference} is not a subclass of verifiers' {base.__name__}.")
    digest = blake2b(reference.encode(), digest_size=4).hexdigest()
    # verifiers looks for modules in lower case.
    name = f"{found.__name__}_{digest}".lower()
    if name not in sys.modules:
        module = ModuleType(name, f"The plugin {reference}.")
        vars(module).update({found.__name__: found}, __all__=[found.__name__])
        sys.modules[name] = module
    return name


def check_options(
    plugin: VerifiersPlugin, kind: type[Any], ident: str, *, error: type[ArealError] = DatasetError
) -> Any:
    """Return the configuration ``kind`` of a plugin. Raises ``error`` naming the options that it does not have."""
    from pydantic import ValidationError

    try:
        return kind.model_validate({**plugin.options, "id": ident})
    except ValidationError as failure:
        said = []
        for one in failure.errors():
            path = ".".join(map(str, one["loc"]))
            close = (
                get_close_matches(path, kind.model_fields, n=1, cutoff=0.6) if one["type"] == "extra_forbidden" else []
            )
            said.append(f"{path or 'options'}: {one['msg']}" + (f"; did you mean {close[0]}?" if close else ""))
        raise error(f"{plugin.id} cannot be used with these options: {'; '.join(said)}.") from failure


def load_taskset(plugin: VerifiersPlugin, *, error: type[ArealError] = DatasetError) -> Any:
    """Return the taskset, whose tasks have not been read yet. Raises ``error`` if there is none, or for its options."""
    vf = import_verifiers(error)
    ident = plugin_id(plugin.id, vf.Taskset, error=error)
    try:
        kind = vf.taskset_config_type(ident)
    except (ImportError, AttributeError, TypeError, ValueError) as failure:
        raise error(f"The taskset {plugin.id} cannot be loaded: {failure}") from failure
    return vf.load_taskset(check_options(plugin, kind, ident, error=error))


def task_rows(plugin: VerifiersPlugin, num: int | None, *, num_made: int) -> list[dict[str, Any]]:
    """Return the first ``num`` problems of a taskset; by default all, or ``num_made`` of one that has no end.

    Raises ``DatasetError`` if the taskset cannot be loaded.
    """
    taskset = load_taskset(plugin)
    limit = num if num is not None or taskset.bounded else num_made
    try:
        tasks: list[Any] = list(islice(taskset, limit))
    except Exception as failure:
        # A taskset is the user's code, and many download data.
        raise DatasetError(f"The taskset {plugin.id} raised {type(failure).__name__}: {failure}") from failure
    rows = []
    for task in tasks:
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        # The position says where a problem comes from; without it, equal tasks of two sets count as equal problems.
        rows.append({"metadata": {"taskset": str(plugin.id), "idx": data.pop("idx", None)}, "task": data})
    return rows
