"""Requests of a concurrent replay that load from tiers. They hold their pages while others compute."""

from __future__ import annotations

from bisect import insort

from hybridkv.cache import Cache, NoRoom
from hybridkv.replay.jobs import Running
from hybridkv.replay.tiers.request import TieredRequest
from hybridkv.replay.tiers.tiers import Tiers
from hybridkv.replay.traces import TraceRequest


class Loading:
    """All loads of a replay; without tiers there are none."""

    def __init__(self, cache: Cache, tiers: Tiers | None) -> None:
        self._cache = cache
        self._tiers = tiers
        self._loading: dict[int, Running] = {}
        self._loaded: list[Running] = []
        """Their load has ended, and their prefill has not begun: the oldest first."""

    def __len__(self) -> int:
        """Requests that hold pages because of a load."""
        return len(self._loading) + len(self._loaded)

    @property
    def num_idle_checkpoints(self) -> int:
        """Number of checkpoints that would fill idle room of the tiers."""
        return 0 if self._tiers is None else self._tiers.num_idle_checkpoints

    def tiered(self, request: TraceRequest, reply: bytes) -> TieredRequest | None:
        """The request's way to the tiers, if there are any."""
        if self._tiers is None:
            return None
        return TieredRequest(self._tiers, request, reply, request.all_breakpoints)

    def begin(self, running: Running, now_s: float) -> float | None:
        """Begin to load what tiers have beyond the memory. Returns when the load ends; None: nothing, or no room."""
        lease = running.lease
        load = None if running.stored is None else running.stored.find(lease, now_s)
        if load is None or self._tiers is None:
            return None
        count = load.supply.end - lease.computed
        if isinstance(self._cache.extend(lease, count, num_loaded=count), NoRoom):
            return None
        running.load = load
        self._loading[running.job.index] = running
        self._tiers.begin(load, now_s)
        return now_s + load.wait_s

    def end(self, running: Running, now_s: float) -> None:
        """What was loaded is in memory from now on. A load that is given up leaves the request where it was."""
        assert running.load is not None
        assert self._tiers is not None
        self._cache.commit(running.lease, failed=running.load.is_late)
        self._tiers.end(running.load, now_s)
        running.load = None
        del self._loading[running.job.index]
        insort(self._loaded, running, key=lambda running: running.job.rank)

    def next_loaded(self) -> Running | None:
        """The oldest request that can go on."""
        return self._loaded.pop(0) if self._loaded else None

    def is_followed_by(self, prompt: bytes) -> bool:
        """Whether a load is under way that supplies this prompt with more than memory has: it should wait for it."""
        if not self._loading:
            return False
        match = self._cache.match(prompt)
        is_loading = any(running.lease is match.leader for running in self._loading.values())
        return is_loading and self._cache.follow(match)
