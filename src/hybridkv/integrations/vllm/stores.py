"""Stores of the connector. Its two halves share one store if they run in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hybridkv.errors import StoreInputError
from hybridkv.store import Store, open_store
from hybridkv.store.address import shown

_lock = threading.Lock()
_opened: dict[tuple[str, ...], tuple[Store, int]] = {}
"""Open stores, and how many hold each."""


def open_shared(urls: Sequence[str]) -> Store:
    """Open a store, or get the one that this process has open under the same URLs. `release` closes it."""
    key = tuple(urls)
    with _lock:
        store, holders = _opened.get(key, (None, 0))
        if store is None:
            store = open_store(list(urls))
        _opened[key] = store, holders + 1
        return store


def release(urls: Sequence[str]) -> None:
    """Close the store if nothing else in this process holds it."""
    key = tuple(urls)
    with _lock:
        store, holders = _opened[key]
        if holders > 1:
            _opened[key] = store, holders - 1
            return
        del _opened[key]
    store.close()


def seen_by_all(urls: Sequence[str]) -> list[str]:
    """Those of the tiers that other processes see, too."""
    shared = [url for url in urls if not url.startswith("memory:")]
    if not shared:
        raise StoreInputError(
            f"store {' '.join(map(shown, urls))}: vLLM's scheduler and its workers are different processes here "
            f"(several GPUs, --distributed-executor-backend, or a CPU), and none sees the memory of another; add a "
            f"tier that they share, such as file:///path?size=200GiB"
        )
    return shared
