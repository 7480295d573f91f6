"""Tests that need a plug-in skip without it, with the line that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
import pytest

from areal_actors.errors import ConfigError
from areal_actors.lib.plugins import PluginGroup, install_advice

__all__ = ["needs_plugin", "skipping_without_plugin"]


def needs_plugin(group: PluginGroup, name: str) -> pytest.MarkDecorator:
    """Return the mark of a test that uses ``name`` of a plug-in of this repository."""
    advice = install_advice(group, name)
    return pytest.mark.skipif(advice is not None, reason=f"{name} {advice}")


@contextmanager
def skipping_without_plugin() -> Iterator[None]:
    """Skip the test if the block names something of a plug-in that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("areal_actors_"):
            raise
        pytest.skip(f"needs the plug-in {(error.name or '').partition('.')[0].replace('_', '-')}")
    except (ConfigError, click.UsageError) as error:
        if "needs the plug-in" not in str(error):
            raise
        pytest.skip(str(error))
