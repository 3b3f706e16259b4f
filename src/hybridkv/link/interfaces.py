"""Network interfaces by address: UCX is told names, people know addresses."""

from __future__ import annotations

import fcntl
import socket
import struct

from hybridkv.errors import InputError

_SIOCGIFADDR = 0x8915
"""The ioctl that returns an interface's IPv4 address."""


def interface_of(host: str) -> str:
    """Name of the interface that has the address of `host`, such as `lo` for 127.0.0.1."""
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise InputError(f"link host {host!r}: {error}; give an address of this machine") from error
    if address.startswith("127."):
        return "lo"
    found = {_address(name): name for _, name in socket.if_nameindex()}
    if address not in found:
        known = ", ".join(sorted(filter(None, found)))
        raise InputError(f"link host {host!r} is {address}, which this machine does not have: it has {known}")
    return found[address]


def _address(interface: str) -> str:
    """Empty: the interface has no IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            found = fcntl.ioctl(one.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])
