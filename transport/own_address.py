"""Finds the address by which others reach this machine: to advertise for a listener, and for a node to listen at.

    a node            the address of the interface by which it reaches its head
    a head at 0.0.0.0 the address of the interface with the default route, else of the first one that is no loopback

Nothing is sent to those addresses, and the machine's own name is not resolved: it often means nothing elsewhere (a
pod's), or leads to loopback (127.0.1.1, as Debian's installer writes it).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Final

_ELSEWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses reserved for documentation (RFC 5737, RFC 3849), which only the default route reaches."""
_ANY_PORT: Final = 9


def own_address(*, also_v6: bool = False) -> str:
    """This machine's address, as a part of an endpoint; its host name if it has none that others could reach.

    ``also_v6``: whether the listener takes IPv6, which is preferred then.
    """
    families = (socket.AF_INET6, socket.AF_INET) if also_v6 else (socket.AF_INET,)
    for family in families:
        if address := _source(family, (_ELSEWHERE[family], _ANY_PORT)):
            return _shown(address)
    for family in families:
        if address := _of_interfaces(family):
            return _shown(address)
    return socket.gethostname()


def address_towards(host: str) -> str:
    """The address by which this machine reaches ``host``, as a part of an endpoint; ``own_address`` if that is unknown.

    If ``host`` is a name, it is resolved.
    """
    with contextlib.suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host.strip("[]"), _ANY_PORT, type=socket.SOCK_DGRAM):
            if address := _source(family, place):
                return _shown(address)
    return own_address()


def interface_towards(host: str) -> str:
    """Name of the interface by which this machine reaches ``host``, which may be its own address.

    Raises:
        OSError: no interface has the address by which this machine reaches ``host``.
    """
    import psutil

    own = address_towards(host).strip("[]")
    for name, addresses in psutil.net_if_addrs().items():
        if own in (address.address for address in addresses):
            return name
    raise OSError(f"no interface of this machine has {own}, the address by which it reaches {host}")


def _source(family: int, place: tuple[str | int, ...] | tuple[int, bytes]) -> str:
    """The source address of packets to ``place``; empty: there is no route, or only loopback."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return _if_reachable(str(probe.getsockname()[0]))
    return ""


def _of_interfaces(family: int) -> str:
    import psutil

    addresses = (address for of_one in psutil.net_if_addrs().values() for address in of_one)
    found = (_if_reachable(address.address) for address in addresses if address.family == family)
    return next(filter(None, found), "")


def _if_reachable(address: str) -> str:
    """``address``, or empty if it is only valid on this machine or this link."""
    parsed = ipaddress.ip_address(address)
    return "" if parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified else address


def _shown(address: str) -> str:
    return f"[{address}]" if ":" in address else address
