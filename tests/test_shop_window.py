"""``import areal_actors``: what it offers, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import areal_actors

_LOADED = """
import json, sys
import areal_actors
before = sorted(sys.modules)
areal_actors.load_config, areal_actors.ActorSystem, areal_actors.backpropagate
print(json.dumps({"import": before, "words": sorted(sys.modules)}))
"""


def test_import_loads_nothing_heavy():
    """The import alone loads no third-party module that matters; configurations, kernel and rewards load no torch."""
    ran = subprocess.run([sys.executable, "-c", _LOADED], check=True, capture_output=True, text=True, timeout=60)
    loaded = json.loads(ran.stdout)

    assert set() == set(loaded["import"]) & {"torch", "starlette", "transformers", "numpy", "anyio", "httpx", "attrs"}
    assert set() == set(loaded["words"]) & {"torch", "transformers"}


def test_processes_without_a_model_load_no_torch():
    """Controller and workers start without torch: seconds, and a quarter of a gigabyte, for each."""
    modules = ("run.training", "run.serving", "run.openers", "worker")
    code = f"import sys, {', '.join(f'areal_actors.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode


@pytest.mark.parametrize("name", areal_actors.__all__)
def test_every_name_can_be_had(name):
    """What is promised is there, is listed by ``dir`` and is what its own module calls by that name."""
    value = getattr(areal_actors, name)

    assert name in dir(areal_actors)
    assert name == getattr(value, "__name__", name)


def test_type_checkers_and_programs_see_the_same_names():
    """The imports that type checkers read are those that are made, module by module."""
    source = Path(areal_actors.__file__).read_text(encoding="utf-8")
    written = {line.strip() for line in source.split("if TYPE_CHECKING:\n")[1].split("\n\n")[0].splitlines()}

    assert written == {f"from {home} import {', '.join(names)}" for home, names in areal_actors._HOMES.items()}


def test_unknown_names_are_refused():
    """A misspelt name is an AttributeError, as of any module."""
    with pytest.raises(AttributeError, match="open_inferenze"):
        _ = areal_actors.open_inferenze
