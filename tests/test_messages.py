"""The words between actors: what the package shows of its modules."""

from __future__ import annotations

import importlib
import pkgutil

from areal_actors import messages

MODULES = [
    importlib.import_module(found.name) for found in pkgutil.iter_modules(messages.__path__, "areal_actors.messages.")
]


def test_the_package_shows_every_name_of_its_modules_once():
    """The package exports every address, message and view, so that tests of the wire cover all of them."""
    defined = sorted(
        name
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    )

    assert defined == sorted(name for name, value in vars(messages).items() if isinstance(value, type))
