"""Clients whose requests take turns: each is an API key, or, for requests without a valid key, an address."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from starlette.requests import Request

from hybridkv.errors import InputError
from hybridkv.serve.access import caller_of
from hybridkv.serve.connection_limits import peer_of


class Clients:
    """Tells clients apart."""

    def __init__(self, proxies: Sequence[str] = ()) -> None:
        """`proxies`: addresses or networks of proxies. Only their X-Forwarded-For is believed: anyone can send one."""
        try:
            self._proxies = [ip_network(one) for one in proxies]
        except ValueError as error:
            raise InputError(f"trusted proxy: {error}; write an address or a network, such as 10.0.0.0/8") from None

    def client_of(self, request: Request) -> str:
        """The name of the client: a digest of its key, or its address."""
        return caller_of(request).owner or self._address_of(request)

    def _address_of(self, request: Request) -> str:
        """The address next to the chain of trusted proxies. Each proxy appends the address that called it."""
        found = request.client.host if request.client is not None else ""
        callers = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
        while callers and self._is_proxy(found):
            caller = _parsed(callers.pop())
            if caller is None:
                break
            found = str(caller)
        return peer_of(found)

    def _is_proxy(self, host: str) -> bool:
        address = _parsed(host)
        return address is not None and any(address in network for network in self._proxies)


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    """The address, or None if the text is none. Sockets of IPv6 show addresses of IPv4 inside of theirs."""
    try:
        address = ip_address(text.strip())
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
