"""A small package with tests, which is installed for a test: three functions, one of which no test notices."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SHAPES = '''"""Shapes on a grid."""


def area(width, height):
    """Return the area.

    >>> area(2, 5)
    10
    """
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height


def clamp(value, low, high):
    best = max(value, low)
    best = min(best, high)
    return best


def untested(value):
    return value + 1


class Path:
    def __init__(self):
        self.points = []

    def add(self, x, y):
        self.points.append((x, y))
        return self

    @property
    def length(self):
        total = 0
        for (a, b), (c, d) in zip(self.points, self.points[1:]):
            total += abs(a - c) + abs(b - d)
        return total
'''

TESTS = """import unittest

from tiny_shapes.grid import Path, area, clamp


class AreaTest(unittest.TestCase):
    def test_area(self):
        self.assertEqual(area(3, 4), 12)

    def test_negative(self):
        with self.assertRaises(ValueError):
            area(-1, 2)

    @unittest.skip("later")
    def test_skipped(self):
        area(1, 1)


def test_clamp():
    assert clamp(5, 1, 3) == 3
    assert clamp(0, 1, 3) == 1


class TestPath:
    def setup_method(self):
        self.path = Path().add(0, 0)

    def test_length(self):
        assert self.path.add(2, 1).length == 3

    def test_of_a_point(self):
        assert self.path.length == 0

    def test_with_a_fixture(self, tmp_path):
        assert tmp_path


def test_that_fails():
    assert clamp(1, 1, 1) == 2
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory):
    """The directory that the package ``tiny_shapes`` is installed in; it looks like one of packages, as boxes show."""
    root: Path = tmp_path_factory.mktemp("lib") / "site-packages"
    for name, text in {
        "__init__.py": "",
        "grid.py": SHAPES,
        "tests/__init__.py": "",
        "tests/test_grid.py": TESTS,
    }.items():
        path = root / "tiny_shapes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.append(str(root))
    importlib.invalidate_caches()
    yield root
    sys.path.remove(str(root))
