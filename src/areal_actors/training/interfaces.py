"""Which of its network interfaces a machine uses for whom."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path

from areal_actors.core.remote.addresses import is_loopback, own_address

__all__ = ["interface_to"]

_SIOCGIFADDR = 0x8915
"""Linux's question for the address of an interface."""


def interface_to(host: str) -> str | None:
    """The interface by which this machine reaches ``host``, which may be itself; ``None`` if that cannot be found out.

    Nothing is sent.
    """
    if is_loopback(host):
        return "lo"
    try:
        own = own_address(host)
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if own in _addresses(name)), None)


def _addresses(interface: str) -> Iterator[str]:
    """Those of an interface of Linux; of IPv4, the first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):  # it may have none
        told = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        yield socket.inet_ntoa(told[20:24])
    with suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
        yield from (str(IPv6Address(bytes.fromhex(line[:32]))) for line in lines if line.split()[-1] == interface)
