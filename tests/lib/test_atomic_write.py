"""A file or directory is replaced completely or not at all."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.lib.atomic_write import atomic_directory, atomic_path, atomic_write, partial_path


class Interrupted(BaseException):
    """Stands for whatever ends a writer early."""


@pytest.mark.parametrize("is_durable", [False, True])
def test_atomic_write_replaces_the_text(tmp_path: Path, *, is_durable: bool) -> None:
    """Nothing but the file itself remains in the directory."""
    path = tmp_path / "state.json"
    path.write_text("old and longer")
    atomic_write(path, "ünïcode", is_durable=is_durable)
    assert path.read_text(encoding="utf-8") == "ünïcode"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_path_shows_the_old_text_until_its_end(tmp_path: Path) -> None:
    """The content is written under another name."""
    path = tmp_path / "state.json"
    path.write_text("old")
    with atomic_path(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [OSError, Interrupted])
def test_atomic_path_that_fails_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    """The part that was written is removed, also when the writer is cancelled."""
    path = tmp_path / "state.json"
    path.write_text("old")
    with pytest.raises(error), atomic_path(path) as partial:
        partial.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_write_sets_the_mode_despite_leftovers(tmp_path: Path) -> None:
    """A key must not be written into a file with the wrong permissions."""
    path = tmp_path / "admin.key"
    partial_path(path).touch(mode=0o644)
    with atomic_path(path, mode=0o600) as partial:
        assert partial.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o600


def test_atomic_write_follows_no_link(tmp_path: Path) -> None:
    """In a directory that others can write to, the target of the link could be any file of this user."""
    other, path = tmp_path / "other", tmp_path / "state"
    other.write_text("untouched")
    partial_path(path).symlink_to(other)
    atomic_write(path, "new")
    assert other.read_text() == "untouched"
    assert path.read_text() == "new"
    assert not path.is_symlink()


@given(old=st.none() | st.sets(st.sampled_from("abc")), new=st.sets(st.sampled_from("abc")), fails=st.booleans())
def test_atomic_directory_is_replaced_whole(
    tmp_path_factory: pytest.TempPathFactory, old: set[str] | None, new: set[str], *, fails: bool
) -> None:
    """A leftover of a crashed writer is never mixed in."""
    root = tmp_path_factory.mktemp("root")
    path = root / "model"
    partial_path(path).mkdir()
    (partial_path(path) / "leftover").touch()
    if old is not None:
        path.mkdir()
        for name in old:
            (path / name).touch()
    with ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(Interrupted))
        partial = stack.enter_context(atomic_directory(path))
        for name in new:
            (partial / name).touch()
        if fails:
            raise Interrupted
    expected = old if fails else new
    found = {file.name for file in path.iterdir()} if path.exists() else None
    assert found == expected
    assert not partial_path(path).exists()
