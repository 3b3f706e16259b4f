"""Who is calling: API keys, the operator's key, and callers of a server without keys that only this machine reaches.

It knows headers and paths, but no endpoint. Keys are kept as digests under a secret of this process.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request

from hybridkv.serve.failures import ForbiddenError, KeyNeededError

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
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_OWN_SITES = (None, "same-origin", "none")
"""Values of Sec-Fetch-Site of requests that no other page has made."""


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
    ) -> None:
        """`is_local`: only this machine reaches the server. `has_page`: paths of the page need no key."""
        self._secret = os.urandom(32)
        self._operator = self._digest(operator_key) if operator_key is not None else None
        self._owners = [self._digest(key) for key in api_keys]
        self._needs_key = bool(api_keys)
        self._is_local = is_local
        self._has_page = has_page

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

    def caller(self, headers: Headers) -> Caller:
        """The caller, whether it may enter or not."""
        if not self.has_keys:
            return self._keyless(headers)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = self._digest(key.strip())
        known = self._owners if self._operator is None else [self._operator, *self._owners]
        matches = [hmac.compare_digest(given, one) for one in known]  # compare all keys: constant time
        if scheme.lower() != "bearer" or not any(matches):
            return Caller("", False, KEY_NEEDED)
        return Caller(given, self._operator is not None and matches[0])

    def may_enter(self, path: str, caller: Caller) -> bool:
        """Whether the caller may use the path. Endpoints for some callers only check more."""
        return not self._needs_key or bool(caller.owner) or self.is_open(path)

    def _keyless(self, headers: Headers) -> Caller:
        """A caller of a server without keys: the operator if it calls from this machine.

        A page of another site does not count as this machine, even in a browser here: its name may have been made to
        lead to this server (DNS rebinding).
        """
        if not self._is_local:
            return Caller("", False, _NO_OPERATOR)
        host, origin = headers.get("host", ""), headers.get("origin")
        is_from_here = (
            _LOOPBACK.fullmatch(host) is not None
            and len(headers.getlist("host")) == 1
            and (origin is None or origin.lower() == f"http://{host}".lower())
            and headers.get("sec-fetch-site") in _OWN_SITES
            and not any(name in headers for name in _PROXY_HEADERS)
        )
        return Caller("", True) if is_from_here else Caller("", False, _NOT_FROM_HERE)

    def _digest(self, key: str) -> str:
        return hmac.digest(self._secret, key.encode(), "sha256").hex()


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
