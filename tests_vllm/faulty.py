"""The connector on stores that fail on demand: for tests, in the engine's own process.

`set_faults` names the faults from now on, for all stores that the process has opened.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridkv.integrations.vllm import HybridKVConnector, stores
from hybridkv.store import FileStore, Store
from hybridkv.store.guard import Guarded
from hybridkv.store.urls import parse_url
from tests.store.faulty import Fault, Kind
from tests.stream.faults import GarbageStore

_opened: list[GarbageStore] = []
_passed_s = [0.0]
_LONG_S = 1000.0


class FaultyConnector(HybridKVConnector):  # type: ignore[misc]
    """The real one. Only the stores differ, which importing this module sees to."""


def open_faulty(urls: Sequence[str]) -> Store:
    """A file store, with bad luck below its checks and a circuit breaker above, as `open_store` would have it."""
    [url] = urls
    address = parse_url(url)
    store = GarbageStore(FileStore(Path(address.path), address.size()))
    _opened.append(store)
    return Guarded(store, "faulty", clock=lambda: time.monotonic() + _passed_s[0])


def set_faults(faults: Sequence[dict[str, Any]]) -> list[int]:
    """Let these strike from now on. Those before end, and circuit breakers try again. Returns how often each struck."""
    counts = struck()
    for store in _opened:
        before = list(store.faults)
        store.faults[:] = [Fault(Kind[fault["kind"]], **options_of(fault)) for fault in faults]
        for fault in before:
            fault.release.set()
    _passed_s[0] += _LONG_S
    return counts


def struck() -> list[int]:
    """How often each of the present faults has struck."""
    return [fault.struck for store in _opened for fault in store.faults]


def options_of(fault: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fault.items() if name != "kind"}


stores.open_store = open_faulty  # type: ignore[assignment]
