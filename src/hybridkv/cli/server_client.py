"""Asks a running server for JSON. It follows no redirect and uses no proxy: the key goes to the named server alone."""

from __future__ import annotations

import http.client
import os
from typing import Any
from urllib.parse import quote, urlsplit

from hybridkv.cli.serve import KEY_VARIABLE, OPERATOR_KEY_VARIABLE, check_key
from hybridkv.errors import InputError
from hybridkv.files import FileError, parse_json

_TIMEOUT_S = 30.0
_MAX_BYTES = 256 * 2**20
_HINTS = {
    401: f"pass --api-key, or set ${OPERATOR_KEY_VARIABLE} or ${KEY_VARIABLE}",
    403: f"pass the operator's key with --api-key, or set ${OPERATOR_KEY_VARIABLE}",
}


class ServerClient:
    """One server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`api_key`: default: of the environment, the operator's first."""
        parts = _address(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url.rstrip("/")
        self._base = parts.path.rstrip("/")
        self._connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        key = api_key
        for name in (OPERATOR_KEY_VARIABLE, KEY_VARIABLE):
            key = os.environ.get(name) if key is None else key
        self._headers = {} if key is None else {"Authorization": f"Bearer {check_key('an API key', key)}"}

    def get(self, *path: str) -> dict[str, Any]:
        """The JSON object at a path, whose parts may have any characters. Raises InputError for all that goes wrong."""
        address = self._base + "".join(f"/{quote(part, safe='', errors='surrogateescape')}" for part in path)
        try:
            self._connection.request("GET", address, headers=self._headers)
            reply = self._connection.getresponse()
            content = reply.read(_MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            reason = (
                error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
            )
            raise InputError(f"no server answers at {self._url}: {reason}; start one, or name it with --url") from None
        finally:
            self._connection.close()
        found = _parse(content)
        if reply.status == 200 and found is not None:
            return found
        raise InputError(f"{self._url} answers {reply.status}: {_message(found)}{_hint(reply.status)}")


def _address(url: str) -> Any:
    try:
        parts = urlsplit(url)
        is_good = parts.hostname is not None and parts.port != 0 and parts.scheme in ("http", "https")
    except ValueError:
        is_good = False
    if not is_good or parts.query or parts.fragment or parts.username or not url.isprintable() or " " in url:
        raise InputError(f"--url {url!r}: write http://HOST:PORT, such as http://127.0.0.1:8000")
    return parts


def _parse(content: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(content)
    except FileError:
        return None
    return found if isinstance(found, dict) else None


def _message(found: dict[str, Any] | None) -> str:
    error = None if found is None else found.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return printable(str(message)) if message else "that is no hybridkv server, or one without records"


def _hint(status: int) -> str:
    hint = _HINTS.get(status)
    return f" ({hint})" if hint is not None else ""


def printable(text: str) -> str:
    """The text without characters that a terminal would act on."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
