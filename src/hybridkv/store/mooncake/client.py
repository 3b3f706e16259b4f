"""Mooncake's Python client with bounded waits, and its error codes as exceptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from hybridkv.errors import StoreError, StoreFault
from hybridkv.store.mooncake.calls import Calls
from hybridkv.store.mooncake.staging import Region, Staging
from hybridkv.store.names import ObjectName

OBJECTS = "hybridkv-v1/objects/"
"""What keys of objects begin with."""

NO_ROOM = -200
INVALID = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASED = -706
_REASONS = {
    NO_ROOM: "it has no room",
    -707: "its lease ended before all bytes had come; raise the master's --default_kv_lease_ttl",
    -800: "the transfer failed; the process that holds the memory may be gone",
    -900: "the master does not answer",
}
_CLOSE_S = 10.0
_ABANDONED: list[object] = []
"""Clients with calls that never returned, and their memory. To free either would crash the process."""


def key_of(name: ObjectName) -> str:
    return f"{OBJECTS}{name}"


class RawClient(Protocol):
    """The methods of `MooncakeDistributedStore` that are used here."""

    def setup(
        self, host: str, metadata: str, segment: int, buffer: int, protocol: str, device: str, master: str
    ) -> int:
        """`segment`: bytes that this process adds to the store; `buffer`: bytes for `upsert` and `get_batch`."""

    def close(self) -> int: ...
    def register_buffer(self, address: int, nbytes: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Any]]: ...
    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]: ...
    def get_into_ranges(
        self,
        addresses: list[int],
        keys: list[list[str]],
        to: list[list[list[int]]],
        offsets: list[list[list[int]]],
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]: ...
    def batch_put_session_start(self, keys: list[str], sizes: list[int]) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], to: list[list[int]]
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def upsert(self, key: str, value: bytes, config: object) -> int: ...
    def get_batch(self, keys: list[str]) -> list[bytes]: ...


class Range(NamedTuple):
    key: str
    offset: int
    nbytes: int
    to: int
    """Offset in the region."""


class Client:
    def __init__(self, raw: RawClient, calls: Calls, staging: Staging) -> None:
        self.calls = calls
        self.staging = staging
        self._raw = raw
        self._is_closed = False

    def exist(self, keys: Sequence[str]) -> list[bool]:
        codes = self.calls.run("look up objects", lambda: self._raw.batch_is_exist(list(keys)))
        for code in self._checked("look up objects", codes, len(keys)):
            if code not in (0, 1):
                raise self.fault("look up objects", code)
        return [code == 1 for code in codes]

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Sizes of those keys that have a complete copy in memory."""
        found = self.calls.run("find objects", lambda: self._raw.batch_get_replica_desc(list(keys)))
        return {key: size for key in keys if (size := _memory_size(found.get(key, []))) is not None}

    def read_whole(self, keys: Sequence[str], region: Region, slot: int) -> list[int]:
        """Read objects of at most `slot` bytes into consecutive slots. Returns their sizes, or error codes."""
        places = [region.address + slot * number for number in range(len(keys))]
        call = region.used_by(lambda: self._raw.batch_get_into(list(keys), places, [slot] * len(keys)))
        return self._checked("read objects", self.calls.run("read objects", call), len(keys))

    def read_ranges(self, ranges: Sequence[Range], region: Region) -> list[int]:
        """Read ranges into the region. Returns their lengths, or error codes."""
        call = region.used_by(
            lambda: self._raw.get_into_ranges(
                [region.address],
                [[one.key for one in ranges]],
                [[[one.to] for one in ranges]],
                [[[one.offset] for one in ranges]],
                [[[one.nbytes] for one in ranges]],
            )
        )
        codes = self.calls.run("read objects", call)
        return self._checked("read objects", [code for one in codes for (code,) in one], len(ranges))

    def begin_put(self, key: str, region: Region, nbytes: int) -> int:
        """Reserve an object of the region's size and transfer its first `nbytes`. Returns 0 or an error code."""

        def begin() -> int:
            (code,) = self._raw.batch_put_session_start([key], [region.nbytes])
            return code if code != 0 else self._put(key, region, 0, nbytes)

        return self._write(key, region, begin)

    def put(self, key: str, region: Region, offset: int, nbytes: int) -> int:
        return self._write(key, region, lambda: self._put(key, region, offset, nbytes))

    def end_put(self, key: str) -> int:
        """Make the object visible."""
        (code,) = self.calls.run("publish an object", lambda: self._raw.batch_put_session_end([key]))
        return code

    def revoke(self, key: str) -> None:
        """Free what was reserved. If that fails, the master does it after --put_start_discard_timeout_sec."""
        with suppress(StoreFault):
            self.calls.run("discard an object", lambda: self._raw.batch_put_session_revoke([key]))

    def remove(self, keys: Sequence[str], *, force: bool) -> list[int]:
        """Returns 0 or an error code for each. LEASED: it was used a moment ago; only `force` removes it."""
        codes = self.calls.run("remove objects", lambda: self._raw.batch_remove(list(keys), force))
        for code in self._checked("remove objects", codes, len(keys)):
            if code not in (0, NOT_FOUND, NOT_READY, LEASED):
                raise self.fault("remove objects", code)
        return codes

    def upsert(self, key: str, value: bytes, config: object) -> None:
        code = self.calls.run("write a description", lambda: self._raw.upsert(key, value, config))
        if code != 0:
            raise self.fault("write a description", code)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Small values; empty for those that cannot be read."""
        return self.calls.run("read descriptions", lambda: self._raw.get_batch(list(keys)))

    def close(self) -> None:
        """Close the client, unless calls hang in it."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self.calls.hung:
                with suppress(StoreError):
                    self.calls.run("close the client", self._raw.close, timeout_s=_CLOSE_S)
        finally:
            self.calls.close()
            if self.calls.hung:
                _ABANDONED.append((self._raw, self.staging))

    def fault(self, what: str, code: int) -> StoreFault:
        return StoreFault(f"{self.calls.label}: cannot {what}: {_REASONS.get(code, f'error code {code}')}")

    def _write(self, key: str, region: Region, call: Callable[[], int]) -> int:
        """If the call is abandoned, what it has reserved is freed when it returns."""

        def revoke() -> None:
            self._raw.batch_put_session_revoke([key])

        return self.calls.run("write an object", region.used_by(call), late=revoke)

    def _put(self, key: str, region: Region, offset: int, nbytes: int) -> int:
        (found,) = self._raw.batch_put_from_multi_buffer_ranges(
            [key], [[region.address + offset]], [[nbytes]], [[offset]]
        )
        return 0 if found == nbytes else min(found, -1)

    def _checked(self, what: str, codes: list[int], count: int) -> list[int]:
        if len(codes) != count:
            raise StoreFault(f"{self.calls.label}: cannot {what}: {len(codes):,} answers to {count:,} questions")
        return codes


def _memory_size(replicas: list[Any]) -> int | None:
    for replica in replicas:
        if replica.is_memory_replica() and replica.status.name == "COMPLETE":
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return None
