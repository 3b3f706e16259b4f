"""The master's HTTP endpoint: names and sizes of what it holds. Nothing here renews an object's lease."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException

from hybridkv.errors import StoreFault
from hybridkv.store.mooncake.calls import Calls

_MOST_BYTES = 1 << 30
_KEYS_AT_ONCE = 500


class Admin:
    def __init__(self, host: str, port: int, calls: Calls) -> None:
        self._host, self._port = host, port
        self._calls = calls

    def keys(self, prefix: str) -> list[str]:
        """All keys with this prefix."""
        return [key for key in self._get("/get_all_keys").splitlines() if key.startswith(prefix)]

    def sizes(self, keys: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Keys that have a copy in memory, with their sizes."""
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            try:
                answer = json.loads(self._get(f"/batch_query_keys?keys={','.join(some)}"))
                data = answer["data"]
                for key in some:
                    copies = data[key]["values"] if key in data else None
                    if copies:
                        yield key, int(copies[0]["size_"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise self._fault("its answer is none of a Mooncake master") from None

    def _get(self, path: str) -> str:
        return self._calls.run("ask the master's HTTP endpoint", lambda: self._fetch(path))

    def _fetch(self, path: str) -> str:
        connection = HTTPConnection(self._host, self._port, timeout=self._calls.timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            raw = response.read(_MOST_BYTES + 1)
        except (OSError, HTTPException) as error:
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            raise self._fault(reason or str(error)) from None
        finally:
            connection.close()
        if response.status != 200 or len(raw) > _MOST_BYTES:
            raise self._fault(f"status {response.status}, {len(raw):,} bytes")
        return raw.decode(errors="replace")

    def _fault(self, reason: str) -> StoreFault:
        place = f"http://{self._host}:{self._port}"
        return StoreFault(
            f"{self._calls.label}: {place}, the master's HTTP endpoint, fails: {reason}; admin=HOST:PORT names another"
        )
