"""Plug-ins are found by entry points of installed distributions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_actors.errors import ConfigError
from areal_actors.lib import plugins
from areal_actors.lib.plugins import PluginGroup, forget_plugins, install_advice, load_plugin, plugin_names

MODULE = """
class Box:
    def __init__(self, log=None): self.log = log
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that adds two backends, of which one does not exist in its module."""
    (tmp_path / "some_boxes.py").write_text(MODULE)
    information = tmp_path / "some_boxes-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: some-boxes\nVersion: 1.0\n")
    lines = ["[areal_actors.sandboxes]", "gvisor = some_boxes:Box", "broken = some_boxes:Missing"]
    (information / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_plugins()
    yield
    forget_plugins()


@pytest.mark.usefixtures("installed")
def test_plugin_is_found_by_its_entry_point():
    """Its name is listed, its object is loaded, and one that is not in its module is named."""
    assert {"broken", "gvisor"} <= set(plugin_names(PluginGroup.SANDBOXES))
    assert load_plugin(PluginGroup.SANDBOXES, "gvisor").__name__ == "Box"
    with pytest.raises(ConfigError, match="some_boxes:Missing, which adds broken, cannot be imported"):
        load_plugin(PluginGroup.SANDBOXES, "broken")


@pytest.mark.usefixtures("installed")
def test_missing_plugin_is_answered_with_its_install_line():
    """Only names of this repository's plug-ins have one."""
    with pytest.raises(ConfigError, match=r"nothing is added to areal_actors.sandboxes by no plug-in"):
        load_plugin(PluginGroup.SANDBOXES, "nothing")
    for group, known in plugins.KNOWN.items():
        for name, plugin in known.items():
            advice = install_advice(group, name)
            if name in plugin_names(group):
                assert advice is None
            else:
                assert advice == (f"needs the plug-in areal-actors-{plugin}; run: pip install areal-actors-{plugin}")
