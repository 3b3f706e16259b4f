"""One request after the other: what the cache can do without concurrency, and how caches are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hybridkv.cache import Cache, Lease, NoRoom, could_fit, extend_some
from hybridkv.replay.meter import Meter
from hybridkv.replay.room import prefill_step
from hybridkv.replay.tiers.request import TieredRequest
from hybridkv.replay.tiers.tiers import TierLoad, Tiers
from hybridkv.replay.traces import TOKEN_BYTES, TraceRequest


class Requests(Protocol):
    """A trace, or its conversations."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> TraceRequest: ...


def replay_serial(
    cache: Cache,
    requests: Requests,
    meter: Meter,
    *,
    prompts_only: bool,
    progress: Callable[[], None],
    tiers: Tiers | None = None,
) -> None:
    """Begin, compute and release each request before the next. `progress` is called after each.

    For `tiers`, the number of the request is the time in seconds.
    """
    for index in range(len(requests)):
        request = requests[index]
        Serving(cache, request, meter, b"" if prompts_only else fed_reply(request), tiers, index).run(not prompts_only)
        meter.ended(index + 1)
        progress()


def fed_reply(request: TraceRequest) -> bytes:
    """The part of a reply that is computed: the last token is sampled and never fed."""
    return request.reply[: max(0, request.output_tokens - 1) * TOKEN_BYTES]


class WithoutBreakpoints:
    """Requests without the breakpoints that the trace names."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> TraceRequest:
        return self._requests[index]._replace(breakpoints=())


class Serving:
    """One request, from its start to its end."""

    def __init__(
        self, cache: Cache, request: TraceRequest, meter: Meter, reply: bytes, tiers: Tiers | None, now: float
    ) -> None:
        self._cache = cache
        self._request = request
        self._meter = meter
        self._reply = reply
        self._tiers = tiers
        self._stored = None if tiers is None else TieredRequest(tiers, request, reply, request.all_breakpoints)
        self._now = now

    def run(self, keeps_end: bool) -> None:
        """Without its reply, a prompt leaves nothing at its very end: what would go on from there is not known."""
        cache, request, meter = self._cache, self._request, self._meter
        if not could_fit(cache.layout, request.prompt_tokens + len(self._reply) // TOKEN_BYTES):
            meter.refused += 1
            meter.never_started(request)
            return
        supply, seen = meter.supply_misses(), meter.seen.length(request)
        store_room = 0 if self._tiers is None else self._tiers.num_idle_checkpoints
        lease = cache.begin(request.prompt, breakpoints=request.all_breakpoints, store_room=store_room)
        load = self._load(lease)
        meter.started(request, lease, supply, seen, load)
        if lease.in_flight:
            cache.commit(lease)
        if not self._compute(lease, seen):
            return
        if self._reply:
            lease.append(self._reply)
            if not self._compute(lease, lease.computed):
                return
        meter.output_tokens += request.output_tokens if keeps_end else 0
        if self._stored is not None and keeps_end:
            self._stored.ended(lease, self._now)
        cache.release(lease, keep=keeps_end)

    def _load(self, lease: Lease) -> TierLoad | None:
        """Begin a load, whose step is in flight then; None: there is none, or no room for it."""
        load = None if self._stored is None else self._stored.find(lease, self._now)
        if load is None or self._tiers is None:
            return None
        count = load.supply.end - lease.computed
        if not load.is_late and isinstance(self._cache.extend(lease, count, num_loaded=count), NoRoom):
            return None
        self._tiers.end(load, self._now)
        return load

    def _compute(self, lease: Lease, before: int) -> bool:
        """Compute all that is known; False: there was no room, and the request is gone."""
        cache, meter = self._cache, self._meter
        while lease.computed < lease.num_tokens:
            step = extend_some(cache, lease, prefill_step(cache, lease))
            if isinstance(step, NoRoom):
                cache.abort(lease)
                meter.refused += 1
                return False
            cache.commit(lease)
            meter.computed(step.start, lease.computed, before)
            meter.seen.add(self._request, lease.computed)
            if self._stored is not None:
                self._stored.stepped(lease, step, self._now)
        return True
