"""The system calls that a box refuses: as a filter for bubblewrap, and as a profile for apptainer.

Docker and podman refuse most of them by their default profiles.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from functools import cache
from pathlib import Path

from areal_actors.lib.scratch import process_directory

_REFUSED_CALLS = {
    # Memory that belongs to no process, for which an unprivileged user has no limit.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "msgget": (68, 186),
    # The session keyring, which the runner's login may have filled: keys have no namespace.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # The log of the kernel, and interfaces by which unprivileged users have taken over kernels.
    "syslog": (103, 116),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
"""System calls that reach past the namespaces and limits of a box: names, and numbers on x86_64 and aarch64."""
_SOCKET_CALL = (41, 198)
_FAMILIES = (1, 2, 10, 16)
"""UNIX, IPv4, IPv6, netlink. Not vsock above all, which reaches the host of a virtual machine from any namespace."""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the numbers above, and the kernel's number of the architecture."""


@cache
def create_filter() -> bytes:
    """Return the filter as instructions of classic BPF (``struct sock_filter``), empty for an unknown architecture.

    Calls are refused as by a kernel without them, so that programs fall back to what they do there.
    """
    if os.uname().machine not in _MACHINES:
        return b""
    column, architecture = _MACHINES[os.uname().machine]
    load, equals, at_least, end = 0x20, 0x15, 0x35, 0x06
    allowed, no_call, no_family = (
        (0, 0, 0x7FFF0000),
        (0, 0, 0x50000 + errno.ENOSYS),
        (0, 0, 0x50000 + errno.EAFNOSUPPORT),
    )
    # The numbers of 32-bit calls and of the x32 interface (bit 30) mean other calls; all of them are refused.
    program = [(load, 0, 0, 4), (equals, 1, 0, architecture), (end, *no_call)]
    program += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (end, *no_call)]
    for numbers in _REFUSED_CALLS.values():
        program += [(equals, 0, 1, numbers[column]), (end, *no_call)]
    program += [(equals, 1, 0, _SOCKET_CALL[column]), (end, *allowed), (load, 0, 0, 16)]
    for family in _FAMILIES:
        program += [(equals, 0, 1, family), (end, *allowed)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in (*program, (end, *no_family)))


@cache
def create_profile() -> Path:
    """Return the file of a profile that refuses the same calls, as JSON in the form of OCI runtimes.

    The architecture is that of the machine: calls of others end the process.
    """
    refused: list[dict[str, object]] = [{"names": list(_REFUSED_CALLS), "action": "SCMP_ACT_ERRNO"}]
    # A rule compares an argument once, so that "none of these families" is one rule for each other family.
    others = [("SCMP_CMP_EQ", family) for family in range(max(_FAMILIES)) if family not in _FAMILIES]
    for operator, family in (*others, ("SCMP_CMP_GT", max(_FAMILIES))):
        compared = {"index": 0, "value": family, "op": operator}
        refused.append({"names": ["socket"], "action": "SCMP_ACT_ERRNO", "args": [compared]})
    path = process_directory() / "seccomp.json"
    path.write_text(json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": refused}), encoding="utf-8")
    return path
