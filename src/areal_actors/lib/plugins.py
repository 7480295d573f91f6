"""Plug-ins: what other distributions add to a run, found by their entry points.

A distribution adds an object by an entry point, whose group says what it is::

    [project.entry-points."areal_actors.sandboxes"]
    bubblewrap = "areal_actors_sandbox.bubblewrap:BubblewrapSandbox"

| Group | The name is | The object is |
|---|---|---|
| ``SANDBOXES`` | a backend of ``rollout.openai.sandbox`` | a function that returns a ``SandboxBackend`` |
| ``DATASETS`` | a source of problems, a key of ``dataset`` | an attrs class with ``DatasetPlugin``'s methods |
| ``WORKFLOWS`` | a form of ``rollout.workflow`` | an attrs class with ``WorkflowPlugin``'s methods |
| ``PROBLEMS`` | a key of problems that commands work on in an environment | a ``ProblemEnvironment`` |
| ``SECTIONS`` | a section of the configuration | an attrs class |
| ``ACCOUNTS`` | any | a function from the ``RunConfig`` to the actor that keeps users and their keys |
| ``UPSTREAMS`` | ``url`` | a coroutine function that finds the model behind a URL, for evaluations |
| ``COMMANDS`` | a command of ``areal-actors`` | a click command |

Classes of settings are imported when a configuration is read, all other objects when something names them. ``import
areal_actors`` imports no plug-in.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from attrs import field, fields

from areal_actors.errors import ConfigError


class PluginGroup(StrEnum):
    """The kinds of objects that plug-ins add."""

    SANDBOXES = "areal_actors.sandboxes"
    DATASETS = "areal_actors.datasets"
    WORKFLOWS = "areal_actors.workflows"
    PROBLEMS = "areal_actors.problems"
    SECTIONS = "areal_actors.sections"
    COMMANDS = "areal_actors.commands"
    ACCOUNTS = "areal_actors.accounts"
    UPSTREAMS = "areal_actors.upstreams"


KNOWN_PLUGINS: Mapping[PluginGroup, Mapping[str, str]] = {
    PluginGroup.SANDBOXES: dict.fromkeys(("bubblewrap", "docker", "podman", "apptainer"), "sandbox"),
    PluginGroup.DATASETS: dict.fromkeys(("harbor", "verifiers", "bfcl"), "environments"),
    PluginGroup.WORKFLOWS: {"verifiers": "environments"},
    PluginGroup.SECTIONS: {"users": "service", "host": "service"},
    PluginGroup.UPSTREAMS: {"url": "evals"},
    PluginGroup.COMMANDS: {
        "tasks": "environments",
        "tinker": "tinker",
        "verify": "evals",
        **dict.fromkeys(("keys", "host", "entry"), "service"),
    },
}
"""The plug-ins of this repository, so that a name whose plug-in is missing is answered with the line to install it."""

_GROUP = "plugin_group"


def plugin_names(group: PluginGroup) -> tuple[str, ...]:
    """Return the names that installed plug-ins add to a group, sorted."""
    return tuple(sorted(_find(group)))


def load_plugin(group: PluginGroup, name: str) -> Any:
    """Return the object of an installed plug-in.

    Raises ``ConfigError`` for an unknown name, with the line that installs a known one, and for a plug-in that cannot
    be imported.
    """
    found = _find(group).get(name)
    if found is None:
        raise ConfigError(f"{name} {install_advice(group, name) or f'is added to {group} by no plug-in.'}")
    try:
        return found.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"The plug-in {found.value}, which adds {name}, cannot be imported: {error}") from error


def install_advice(group: PluginGroup, name: str) -> str | None:
    """Return words to follow ``name``: how to install its plug-in. ``None`` if it is installed, or none is known."""
    plugin = KNOWN_PLUGINS.get(group, {}).get(name)
    if plugin is None or name in _find(group):
        return None
    return f"needs the plug-in areal-actors-{plugin}; run: pip install areal-actors-{plugin}"


@cache
def _find(group: PluginGroup) -> Mapping[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=group)}


def forget_plugins() -> None:
    """Look for plug-ins again at the next use, after one was installed into this process."""
    _find.cache_clear()


def plugin_settings(group: PluginGroup) -> Any:
    """Return a field of a settings class for the settings that plug-ins of ``group`` add to it, by name.

    In a configuration they stand next to the settings of the class; each has an attrs class of its own.
    """
    return field(factory=dict, metadata={_GROUP: group})


def group_of(cls: Any) -> tuple[str, PluginGroup] | None:
    """Return the field of a settings class that ``plugin_settings`` made, and its group; ``None`` if it has none."""
    return next(((one.name, one.metadata[_GROUP]) for one in fields(cls) if _GROUP in one.metadata), None)
