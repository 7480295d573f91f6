"""Modules whose tests are installed with them: those of a package, of the standard library, and doctests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import SOURCE_SUFFIXES
from pathlib import Path

from attrs import frozen

from areal_actors.errors import DatasetError

__all__ = ["TestedModule", "find_modules"]

_RUNNER = ("ast", "doctest", "importlib", "inspect", "json", "linecache", "os", "signal", "subprocess", "traceback")
_NOT_TESTED = (*_RUNNER, "unittest", "test", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "venv", "site")
"""Modules that run the tests, and parts of the standard library whose tests need a display or the network."""
_TEST_FOLDERS = frozenset({"tests", "test", "testing"})
_MAX_BYTES = 200_000


@frozen(kw_only=True)
class TestedModule:
    """A module in one file, and the modules with its tests."""

    __test__ = False  # pytest takes it for a class of tests

    name: str
    file: Path
    path: str
    """The file, relative to the directory of ``sys.path`` that it is in."""
    tests: tuple[str, ...]
    """Modules with tests, and ``doctest`` for the examples in its docstrings."""
    package: str
    version: str

    @property
    def source(self) -> str:
        """The text of its file."""
        return self.file.read_text(encoding="utf-8")


def find_modules(name: str) -> tuple[TestedModule, ...]:
    """Return the tested modules of an installed package, or the one module of that name, by name.

    Nothing is imported but the packages that contain ``name``. Raises ``DatasetError`` for a name that is not
    installed, has no source, or whose tests are not installed.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise DatasetError(f"There is no module {name}: {error}.") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(tuple(SOURCE_SUFFIXES)):
        raise DatasetError(f"There is no module {name} with Python source here; install it, or name another.")
    origin = Path(spec.origin)
    root = origin.parents[name.count(".") + (origin.name == "__init__.py")]
    files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
    package = name.partition(".")[0]
    # To look up the distribution of a package reads the files of all, a second here.
    distributions = () if package in sys.stdlib_module_names else metadata.packages_distributions().get(package, ())
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    version = next((f"{one} {metadata.version(one)}" for one in distributions), python)
    found = []
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        is_test = not _TEST_FOLDERS.isdisjoint(parts[:-1]) or file.name.startswith(("test_", "conftest"))
        if parts[0] in _NOT_TESTED or is_test or file.name == "__init__.py":
            continue
        tests = tuple(_find_tests(file, root))
        if tests and file.stat().st_size <= _MAX_BYTES:
            path = str(file.relative_to(root))
            found.append(
                TestedModule(name=".".join(parts), file=file, path=path, tests=tests, package=package, version=version)
            )
    if not found:
        raise DatasetError(
            f"No tests of {name} are installed: neither test_*.py in its package or in the standard library's, nor "
            "examples in docstrings."
        )
    return tuple(found)


def _find_tests(file: Path, root: Path) -> Iterator[str]:
    """Yield the modules with tests of a module: test_<its name> next to it or above, and its doctests."""
    stem = file.stem.strip("_")
    directory = file.parent
    while directory.is_relative_to(root):
        for folder in ("tests", "test"):
            found = directory / folder / f"test_{stem}.py"
            # The tests of the standard library are for its own modules, and the last ones to be looked at.
            if found.is_file() and (directory != root or file.parent == root):
                yield ".".join(found.relative_to(root).with_suffix("").parts)
                directory = root
                break
        if directory == root:
            break
        directory = directory.parent
    if ">>> " in file.read_text(encoding="utf-8", errors="replace"):
        yield "doctest"
