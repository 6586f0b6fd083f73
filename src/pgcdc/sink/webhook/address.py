"""Addresses that a webhook must not lead to: those inside of a network, where requests of a stranger have no business.

They are looked at when a connection is made, not when the name was resolved: a name server that gives another answer the
next time gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

__all__ = ["AddressRefused", "guarded_socket", "is_public"]

_NEVER = [
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32",  # Azure's own services: a public address, and yet inside
        "192.0.0.0/24",  # of protocols, and metadata of a cloud; older versions of Python know a part of it
        "192.88.99.0/24",  # relays of 6to4
        "::/96",  # IPv4 in its oldest disguise
        "64:ff9b:1::/48",  # translation inside of a network
        "fec0::/10",  # site-local, before it was abandoned
    )
]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class AddressRefused(OSError):
    """Raised instead of a connection. Its text is always the same: so it is told as one if a name has several of them."""

    def __init__(self) -> None:
        super().__init__("the address is private")


def is_public(text: str) -> bool:
    """Whether an address is one of the internet at large."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if any(address in network for network in _NEVER):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None:
            return False
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast and not address.is_reserved


def guarded_socket(info: tuple[Any, ...]) -> socket.socket:
    """A socket for this address (as `getaddrinfo` has it). AddressRefused: it is not public."""
    family, kind, protocol, _, address = info
    if not is_public(str(address[0])):
        raise AddressRefused
    return socket.socket(family, kind, protocol)
