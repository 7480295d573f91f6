"""Keeps every Python process that starts with this folder on its path on this machine.

Python imports this module by its name when it starts, in child processes, too. Looking up or connecting to anything but
this machine fails, and is written down in the file that ``NETWORK_LOG`` names. Nothing else belongs here: agents are
started with it as they are.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import Any

_LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
_SENDS = {"socket.connect", "socket.sendto", "socket.sendmsg"}


def is_here(host: Any) -> bool:
    """Whether ``host``, a name or an address, is this machine; an empty one listens."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in {None, "", "localhost"}:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def guard(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: refuses what would leave this machine. Sockets that are files have a text for an address."""
    if event in _LOOKUPS:
        host = arguments[0]
    elif event in _SENDS and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if not is_here(host):
        with open(os.environ["NETWORK_LOG"], "a", encoding="utf-8") as log:  # noqa: PTH123 - imported at every start
            log.write(f"{event} {host!r} by {' '.join(sys.argv[:3])}\n")
        raise PermissionError(f"{event} to {host!r}: this process may talk to this machine only.")


if "NETWORK_LOG" in os.environ:
    sys.addaudithook(guard)
