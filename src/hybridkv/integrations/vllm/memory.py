"""vLLM's memory as pages, and the threads that copy between it and the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from hybridkv.integrations.vllm.pages import LayerPages
from hybridkv.integrations.vllm.settings import Settings
from hybridkv.integrations.vllm.stores import open_shared, release
from hybridkv.store import Store
from hybridkv.stream import Catalogue, Load, Mover, StreamStats
from hybridkv.stream.form import Chunk
from hybridkv.workers import Workers

_CLOSE_TIMEOUT_S = 30.0
_LAST_READS_S = 2.0


class BlockMemory:
    """All blocks of one worker. The store is opened with the first step, which brings the identity of the weights."""

    def __init__(
        self,
        catalogue: Catalogue,
        buffers: Mapping[Chunk, torch.Tensor],
        settings: Settings,
        stats: StreamStats,
        on_load: Callable[[], None],
    ) -> None:
        """`on_load`: called on any thread when a load has ended."""
        self.pages = LayerPages(buffers)
        self.copier = Workers(1, "hybridkv-copy")
        self._toucher = Workers(1, "hybridkv-touch")
        self._catalogue = catalogue
        self._settings = settings
        self._stats = stats
        self._on_load = on_load
        self._identity = ""
        self._store: Store | None = None
        self._mover: Mover | None = None

    def mover(self, identity: str) -> Mover:
        if identity != self._identity:
            self._identity = identity
            self._catalogue.identify(identity)
        if self._mover is None:
            self._store = open_shared(self._settings.store)
            self._mover = Mover(
                self._store,
                self._catalogue,
                self.pages,
                self._stats,
                load_timeout_s=self._settings.load_timeout_s,
                max_waiting_bytes=self._settings.waiting_bytes,
                on_load=self._on_load,
            )
        return self._mover

    def ended(self, load: Load) -> None:
        """Count a load that has ended or was given up. Objects of a successful load are touched in the store."""
        assert self._mover is not None
        assert self._store is not None
        self._mover.ended(load, "async")
        if load.failure is None:
            self._toucher.submit(partial(self._store.touch, list(reversed(load.names))))

    def close(self) -> None:
        """Write everything that was saved, then close the store."""
        if self._mover is not None:
            self._mover.close(_CLOSE_TIMEOUT_S, _LAST_READS_S)
            self._toucher.close(_LAST_READS_S)
            self._mover = None
            release(self._settings.store)
        self.copier.close(_LAST_READS_S)
