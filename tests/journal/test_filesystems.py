"""Which filesystem a path lies on, by the kernel's table."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_actors.journal.sqlite import filesystem_of, is_network

MOUNTS = r"""/dev/sda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/me/disk xfs rw 0 0
share /mnt/with\040space fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/run.sqlite", "ext4"),
        ("/home/me/run.sqlite", "nfs4"),
        ("/home/me/disk/run.sqlite", "xfs"),
        ("/homework/run.sqlite", "ext4"),
        ("/mnt/with space/run.sqlite", "fuse.sshfs"),
    ],
)
def test_innermost_mount_counts(path, kind):
    """A disk below a network's directory is a disk, and names are compared whole."""
    assert kind == filesystem_of(Path(path), MOUNTS)


def test_network_filesystems_are_known():
    """Disks and memory are not among them, nor is a system that tells nothing."""
    assert all(map(is_network, ["nfs", "nfs4", "cifs", "lustre", "ceph", "fuse.sshfs", "fuse.juicefs", "gpfs"]))
    assert not any(map(is_network, ["", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "apfs"]))


def test_this_machine_has_a_filesystem():
    """The kernel's own table can be read."""
    assert isinstance(filesystem_of(Path(__file__).resolve()), str)
