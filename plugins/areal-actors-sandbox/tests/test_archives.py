"""Archives from a box are not trusted: whatever they hold, nothing outside of their target is written or shown."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_actors_sandbox.inside import pack, unpack

PARTS = st.lists(st.sampled_from(["a", "b", "c", "..", ".", ""]), min_size=1, max_size=5).map("/".join)
NAMES = st.one_of(PARTS, PARTS.map(lambda name: "/" + name), st.just("/outside"))
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])


def archive(entries: list[tuple[bytes, str, str]]) -> io.BytesIO:
    """A tar of these kinds, names and link targets, in this order."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for kind, name, link in entries:
            member = tarfile.TarInfo(name or "a")
            member.type, member.linkname, member.mode = kind, link or "a", 0o4777
            member.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"evil") if member.size else None)
    stream.seek(0)
    return stream


@given(st.lists(st.tuples(KINDS, NAMES, NAMES), max_size=8))
@example([(tarfile.SYMTYPE, "d", "."), (tarfile.SYMTYPE, "d/x", "..")])
@example([(tarfile.SYMTYPE, "d", "."), (tarfile.SYMTYPE, "e", "d/../../outside")])
@example([(tarfile.SYMTYPE, "d", "/"), (tarfile.REGTYPE, "d/outside", "")])
def test_unpack_never_writes_outside_its_target(entries):
    """Through names, links, links to links, or a file where a link was before."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(os.path.realpath(name))
        (root / "outside").write_text("kept")
        target = root / "x" / "y" / "target"
        with suppress(OSError):  # a file and a directory of one name
            unpack(archive(entries), str(target))
        found = [Path(above, entry) for above, dirs, files in os.walk(root / "x") for entry in (*dirs, *files)]

        assert (root / "outside").read_text() == "kept"
        assert {path.name for path in root.iterdir()} == {"outside", "x"}
        for path in found:
            if path.is_relative_to(target):
                try:
                    real = path.resolve(strict=True)
                except (OSError, RuntimeError):
                    continue  # a link to nothing, or a circle
                assert real.is_relative_to(target), path
                assert not real.stat().st_mode & 0o7000 & ~0o1000
        assert {path.name for path in (root / "x").iterdir()} == {"y"}
        assert {path.name for path in (root / "x" / "y").iterdir()} == {"target"}


def test_unpack_restores_what_pack_wrote(tmp_path: Path):
    """Files, directories, whether a file can be executed, and links; a single file keeps its name."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "run").write_bytes(b"#!\n")
    (source / "sub" / "run").chmod(0o755)
    (source / "link").symlink_to("sub/run")
    os.mkfifo(source / "pipe")
    for path in (source, source / "sub" / "run"):
        stream = io.BytesIO()
        pack(str(path), stream)
        stream.seek(0)
        assert unpack(stream, str(target)) == ()

    assert {path.relative_to(target).as_posix() for path in target.rglob("*")} == {
        "link", "run", "sub", "sub/empty", "sub/run",
    }  # fmt: skip
    assert os.access(target / "run", os.X_OK)
    assert (target / "link").readlink() == Path("sub/run")


def test_unpack_counts_files_against_the_limit(tmp_path: Path):
    """Each counts for at least 4 KiB, also an empty one."""
    entries = [(tarfile.DIRTYPE, f"d{number}", "") for number in range(100)]
    with pytest.raises(OverflowError, match="more than 0 MiB"):
        unpack(archive(entries), str(tmp_path), max_bytes=99 * 4096)
    unpack(archive(entries), str(tmp_path), max_bytes=100 * 4096)


@pytest.mark.parametrize("num_blocks", [12, 13, 14, 33])
def test_unpack_reads_the_archive_to_its_end(tmp_path, num_blocks):
    """For one size of 20, the files end where a record does: the writer of a pipe must not fail at the next one."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(bytes(512 * num_blocks))
    stream = io.BytesIO()
    pack(str(tmp_path / "source"), stream)
    stream.seek(0)
    unpack(stream, str(tmp_path / "target"))

    assert b"" == stream.read()
