"""``make_once``: complete or not at all, made by one, whoever is killed."""

from __future__ import annotations

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_actors.errors import ModelError
from areal_actors.models.making import make_once
from areal_actors.models.tiny import create_tiny


def fill(target: Path) -> None:
    (target / "weights").write_text("all of them")


def test_what_was_made_is_not_made_again(tmp_path: Path) -> None:
    """The second time costs nothing but a look."""
    make_once(tmp_path / "cache" / "model", fill)

    def refuse(target: Path) -> None:
        raise AssertionError(target)

    assert (make_once(tmp_path / "cache" / "model", refuse) / "weights").read_text() == "all of them"


def test_those_who_come_at_the_same_time_get_one_model(tmp_path: Path) -> None:
    """One makes, the others wait for it, and all see it complete."""
    makers: list[int] = []
    is_waiting = threading.Event()

    def fill_slowly(target: Path) -> None:
        makers.append(threading.get_ident())
        is_waiting.wait(timeout=10)
        fill(target)

    with ThreadPoolExecutor(max_workers=4) as pool:
        found = [pool.submit(make_once, tmp_path / "model", fill_slowly) for _ in range(4)]
        is_waiting.set()
        texts = [(future.result() / "weights").read_text() for future in found]

    assert texts == ["all of them"] * 4
    assert len(makers) == 1


def test_a_failed_making_leaves_nothing_that_looks_like_a_model(tmp_path: Path) -> None:
    """What raises is raised, and the next one starts anew."""

    def fail(target: Path) -> None:
        fill(target)
        raise ModelError("half of the weights are missing")

    with pytest.raises(ModelError, match="half of the weights"):
        make_once(tmp_path / "model", fail)

    assert not (tmp_path / "model").exists()
    assert make_once(tmp_path / "model", fill).is_dir()


def test_what_a_killed_maker_left_is_cleared_away(tmp_path: Path) -> None:
    """A partial model never becomes part of a complete one."""
    partial = tmp_path / ".model.partial"
    partial.mkdir()
    (partial / "junk").write_text("left by somebody who was killed")
    made = make_once(tmp_path / "model", fill)

    assert [path.name for path in made.iterdir()] == ["weights"]
    assert not partial.exists()


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    """The error says what cannot be written, why, and what to do."""
    (tmp_path / "cache").write_text("a file where the directory should be")

    with pytest.raises(ModelError, match=r"cannot be written.*AREAL_CACHE"):
        make_once(tmp_path / "cache" / "model", fill)


def test_a_disk_that_is_full_while_weights_are_written_is_named(tmp_path: Path) -> None:
    """The real writer of the real model, cut off: one message with what to do, and nothing left that looks whole."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # Python sees EFBIG where a full disk says ENOSPC
    try:
        with pytest.raises(ModelError, match="Free space there"):
            create_tiny(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [] == [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
