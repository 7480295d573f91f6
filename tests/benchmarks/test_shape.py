"""The figures of ``nox -s shape`` are of the source as it stands."""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest

from benchmarks import shape


def sources(**texts: str) -> shape.Source:
    """Modules of the package with these texts."""
    paths = {shape.PACKAGE / "p" / f"{name}.py": text for name, text in texts.items()}
    return shape.Source(paths, {path: ast.parse(text) for path, text in paths.items()})


def test_cycles_are_found_also_where_only_type_checkers_see_them() -> None:
    """Modules that import one another are one group; those that only import are in none."""
    source = sources(
        a="from areal_actors.p import b",
        b="from areal_actors.p.c import x",
        c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from areal_actors.p.a import y",
        d="import areal_actors.p.a",
    )

    assert [["areal_actors.p.a", "areal_actors.p.b", "areal_actors.p.c"]] == shape.find_cycles(source)


def test_a_file_with_one_importer_in_its_folder_is_counted() -> None:
    """One that two modules import is not, nor one that nothing imports."""
    source = sources(
        a="from areal_actors.p import b, c", b="", c="from areal_actors.p.d import x", d="", e="import areal_actors.p.d"
    )

    assert [Path("p/b.py"), Path("p/c.py")] == [
        path.relative_to(shape.PACKAGE) for path in shape.find_single_importer_files(source)
    ]


def test_single_use_counts_references_within_the_file() -> None:
    """A private function that is called twice, or a public one, is none."""
    source = sources(a="def f():\n    _once()\n    _twice()\n    _twice()\ndef _once(): ...\ndef _twice(): ...")

    assert (3, [(shape.PACKAGE / "p" / "a.py", "_once")]) == shape.find_single_use(source)


def test_hooks_that_libraries_call_by_name_are_no_private_helpers() -> None:
    """``_repr_html_`` is IPython's, ``_missing_`` is the enum's; nothing in the file has to refer to them."""
    source = sources(
        a="class A:\n    def _repr_html_(self): ...\n    def _missing_(self): ...\n    def _once(self): ..."
    )

    assert (3, [(shape.PACKAGE / "p" / "a.py", "_once")]) == shape.find_single_use(source)


def test_a_coroutine_that_continues_is_not_entered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts for the request that entered it; decorated functions and generators count where they begin."""
    monkeypatch.setattr(shape, "PACKAGE", Path(__file__).parent)
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if shape.is_entry(frame, event):
            entered.append(frame.f_code.co_name)

    coroutine = waiting()
    try:
        sys.setprofile(note)
        coroutine.send(None)
        decorated()
        with pytest.raises(StopIteration):
            coroutine.send(None)
    finally:
        sys.setprofile(None)

    assert ["waiting", "pause", "decorated"] == [name for name in entered if name in {"waiting", "pause", "decorated"}]


@types.coroutine
def pause() -> Generator[None, None, None]:
    """Give way once."""
    yield


async def waiting() -> None:
    """Wait once."""
    await pause()


@functools.cache
def decorated() -> None:
    """Begin at the line of the decorator."""


def test_each_package_has_its_share() -> None:
    """The importers are those of the whole source; everything else is counted in the package."""
    source = sources(a="from areal_actors.p import b\ndef f():\n    _once()\ndef _once(): ...\n", b="# why\n")

    (share,) = shape.measure_packages(source)
    assert ("p", 2, 5, ("p/b.py",)) == (share.package, share.num_files, share.num_lines, share.single_importer)
    assert (50.0, 20.0) == (share.single_use_percent, share.comment_percent)
