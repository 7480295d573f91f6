"""Marks of tests that need a plug-in: without it, they skip with the line that installs it."""

from __future__ import annotations

import pytest

from areal_actors.lib.plugins import PluginGroup, install_advice

__all__ = ["needs_plugin"]


def needs_plugin(group: PluginGroup, name: str) -> pytest.MarkDecorator:
    """Return the mark of a test that uses ``name`` of a plug-in of this repository."""
    advice = install_advice(group, name)
    return pytest.mark.skipif(advice is not None, reason=advice or "")
