"""Access of callers: API keys, the operator's key, and hosts and pages that a server without keys answers.

A server without keys trusts everyone who reaches it, but not the pages that their browsers show: those could send
requests to any address, or make their own name lead to it (DNS rebinding). It knows headers and paths, but no endpoint.
Keys are kept as digests under a secret of this process.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request

from hybridkv.errors import InputError, RequestError
from hybridkv.serve.cors import CORS_PATHS
from hybridkv.serve.failures import ForbiddenError, KeyNeededError, is_anthropic

MONITORING = frozenset(("/health", "/metrics"))
"""Paths for monitoring: they need no key, and reveal nothing about requests."""
PAGE = "/"
PAGE_FILES = "/ui/"
"""Paths of the page: they need no key either, since a browser sends none before the page has asked for it."""
KEY_NEEDED = "a valid API key is needed: send it as 'Authorization: Bearer KEY'"
_OPERATOR_NEEDED = "this is for the operator alone: start the server with --operator-key, and send that key"
_NO_OPERATOR = "this server has no operator: start it with --operator-key, and send that as 'Authorization: Bearer KEY'"
_NOT_FROM_HERE = (
    "without keys only this machine may look inside: call http://127.0.0.1 or http://localhost, without a proxy and "
    "from no other page, or start the server with --operator-key"
)
_HOST = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", re.IGNORECASE | re.ASCII)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ALLOWED_HOST = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
_ORIGIN = re.compile(r"\*|[a-z][a-z\d+.-]*://([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?", re.ASCII)
_OTHER_HOST = (
    "this server has no keys and does not answer to the host {host!r}: call it by its IP address, or start it with "
    "--allowed-host {name}"
)
_OTHER_PAGE = (
    "a page of {origin} may not use this server, which has no keys: start it with --cors-origin ORIGIN to let pages of "
    f"that origin use the paths under {CORS_PATHS}"
)
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site of requests that no page of another site has made."""


class Caller(NamedTuple):
    """One who has sent a request."""

    owner: str
    """Digest of the key; empty without a valid key."""
    is_operator: bool
    refusal: str | None = None
    """Why the caller may not look at any request; None if it may look at some."""

    def may_see(self, owner: str) -> bool:
        """Whether requests of this owner are shown to the caller. Those without a key are the operator's."""
        return self.is_operator or (bool(owner) and hmac.compare_digest(owner, self.owner))


class Access:
    """The keys of a server."""

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        operator_key: str | None = None,
        *,
        is_local: bool = False,
        has_page: bool = False,
        allowed_hosts: Sequence[str] = (),
        cors_origins: Sequence[str] = (),
    ) -> None:
        """`is_local`: only this machine reaches the server. `has_page`: paths of the page need no key.

        `allowed_hosts`: names by which a server without keys is called, besides addresses and localhost.
        `cors_origins`: origins whose pages may use the paths under /v1.
        """
        check_sites(allowed_hosts, cors_origins, has_keys=bool(api_keys))
        self.cors_origins = tuple(cors_origins)
        self._secret = os.urandom(32)
        self._operator = self._digest(operator_key) if operator_key is not None else None
        self._owners = [self._digest(key) for key in api_keys]
        self._needs_key = bool(api_keys)
        self._is_local = is_local
        self._has_page = has_page
        self._allowed_hosts = tuple(host.lower() for host in allowed_hosts)

    @property
    def has_keys(self) -> bool:
        """Whether there is any key, so that looking at requests needs one."""
        return self._needs_key or self._operator is not None

    @property
    def has_operator_key(self) -> bool:
        return self._operator is not None

    def is_open(self, path: str) -> bool:
        """Whether the path needs no key in any case."""
        return path in MONITORING or (self._has_page and (path == PAGE or path.startswith(PAGE_FILES)))

    def caller(self, headers: Headers, path: str = "") -> Caller:
        """The caller, whether it may enter or not. `path`: Anthropic's endpoints take keys as its clients send them."""
        if not self.has_keys:
            return self._keyless(headers)
        key = _key_in(headers, path)
        given = self._digest(key or "")
        known = self._owners if self._operator is None else [self._operator, *self._owners]
        matches = [hmac.compare_digest(given, one) for one in known]  # compare all keys: constant time
        if key is None or not any(matches):
            return Caller("", False, KEY_NEEDED)
        return Caller(given, self._operator is not None and matches[0])

    def refusal(self, caller: Caller, method: str, path: str, headers: Headers) -> RequestError | None:
        """Why the caller may not use the path, or None. Endpoints for some callers only check more."""
        if caller.owner:
            return None
        if self._needs_key:
            return None if self.is_open(path) else KeyNeededError(KEY_NEEDED)
        for host in headers.getlist("host"):
            if path not in MONITORING and not self._is_allowed_host(host):
                return ForbiddenError(_OTHER_HOST.format(host=host[:200], name=_host_name(host) or "NAME"))
        is_own = _is_own_page(headers) or headers.getlist("sec-fetch-site") == ["same-origin"]  # behind a TLS proxy
        if not (is_own or _is_navigation(method, headers) or self._is_allowed_page(path, headers)):
            return ForbiddenError(_OTHER_PAGE.format(origin=headers.get("origin", "another site")[:200]))
        return None

    def _keyless(self, headers: Headers) -> Caller:
        """A caller of a server without keys: the operator if it calls from this machine."""
        if not self._is_local:
            return Caller("", False, _NO_OPERATOR)
        hosts = headers.getlist("host")
        is_from_here = (
            len(hosts) == 1
            and _host_name(hosts[0]) in _LOOPBACK
            and _is_own_page(headers)
            and not any(name in headers for name in _PROXY_HEADERS)
        )
        return Caller("", True) if is_from_here else Caller("", False, _NOT_FROM_HERE)

    def _is_allowed_host(self, host: str) -> bool:
        """Whether the host is an address, which no page can make its own name, or an allowed name."""
        name = _host_name(host)
        if name is None:
            return False
        return (
            name == "localhost"
            or _is_address(name)
            or any(
                known in (name, "*") or (known.startswith("*.") and name.endswith(known[1:]))
                for known in self._allowed_hosts
            )
        )

    def _is_allowed_page(self, path: str, headers: Headers) -> bool:
        origins = headers.getlist("origin")
        return path.startswith(CORS_PATHS) and len(origins) == 1 and origins[0] in self.cors_origins

    def _digest(self, key: str) -> str:
        return hmac.digest(self._secret, key.encode(), "sha256").hex()


def check_sites(allowed_hosts: Sequence[str], cors_origins: Sequence[str], *, has_keys: bool) -> None:
    """Refuse names that are none, origins that no browser sends, and pages of all origins on a server without keys."""
    for host in allowed_hosts:
        if _ALLOWED_HOST.fullmatch(host) is None and not _is_address(host):
            raise InputError(f"allowed host {host!r}: write a name without a port, such as gpu.example or *.example")
    for origin in cors_origins:
        if _ORIGIN.fullmatch(origin) is None:
            raise InputError(f"CORS origin {origin!r}: write it as browsers send it, such as https://chat.example")
        if origin == "*" and not has_keys:
            raise InputError(
                "CORS origin '*' without an API key: any page that a browser shows could use the server; name the "
                "origins, or set an API key"
            )


def _key_in(headers: Headers, path: str) -> str | None:
    """The key that a caller sends, as OpenAI's clients do or, on Anthropic's endpoints, as its clients do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key") if is_anthropic(path) else None


def _host_name(host: str) -> str | None:
    """The name or address in a Host header, in small letters; None if the header is malformed."""
    found = _HOST.fullmatch(host)
    return None if found is None else (found[1] or found[2]).lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_own_page(headers: Headers) -> bool:
    """Whether the request comes from no page, or from a page of this server. Browsers let no page change this."""
    own = f"http://{headers.get('host', '')}".lower()
    return all(origin.lower() == own for origin in headers.getlist("origin")) and all(
        site in _OWN_SITES for site in headers.getlist("sec-fetch-site")
    )


def _is_navigation(method: str, headers: Headers) -> bool:
    """Whether a browser opens the address in a tab, such as after a click on a link: no page can read the reply."""
    return (
        method in ("GET", "HEAD")
        and "origin" not in headers
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def caller_of(request: Request) -> Caller:
    """The caller of a request, with or without rights."""
    caller: Caller = request.state.caller
    return caller


def need_caller(request: Request) -> Caller:
    """The caller, if it may look at some requests."""
    caller = caller_of(request)
    if caller.refusal == KEY_NEEDED:
        raise KeyNeededError(KEY_NEEDED)
    if caller.refusal is not None:
        raise ForbiddenError(caller.refusal)
    return caller


def need_operator(request: Request) -> Caller:
    """The caller, if it is the operator."""
    caller = need_caller(request)
    if not caller.is_operator:
        raise ForbiddenError(_OPERATOR_NEEDED)
    return caller
