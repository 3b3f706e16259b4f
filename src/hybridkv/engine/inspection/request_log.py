"""What a request notes while it is served, for its record. Called on the engine's thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hybridkv.cache import BreakpointAccount, Cache, Evicted, Explanation, Lease, Match
from hybridkv.engine.inspection.publishing import Publishing
from hybridkv.engine.inspection.record import Moment, RequestRecord, Span, StoreAccount
from hybridkv.stream import Load
from hybridkv.stream.times import LayerTime, RowTime

if TYPE_CHECKING:
    from hybridkv.engine.request import Request

_MOST_STEPS = 128
"""After so many moments, steps of the prompt join the last one."""
_MOST_MOMENTS = 256
"""Later ones are dropped."""


class RequestLog:
    """The notes of one request."""

    __slots__ = (
        "_arrived_at",
        "_began_s",
        "_breakpoints",
        "_evicted",
        "_layers",
        "_loaded_to",
        "_looked_up_s",
        "_lookup",
        "_moments",
        "_publishing",
        "_rows",
        "store",
    )

    def __init__(self, publishing: Publishing, began_s: float, *, has_store: bool) -> None:
        self._publishing = publishing
        self._began_s = began_s
        self._arrived_at = time.time()
        self._lookup: Explanation | None = None
        self._looked_up_s = began_s
        self._evicted: Evicted | None = None
        self._breakpoints: tuple[BreakpointAccount, ...] | None = None
        self._loaded_to = 0
        self.store = StoreAccount("not asked") if has_store else None
        self._moments: list[Moment] = [Moment(0.0, "queued")]
        self._rows: tuple[RowTime, ...] = ()
        self._layers: tuple[LayerTime, ...] = ()

    def note(self, what: str, start: int | None = None, end: int | None = None, seconds: float | None = None) -> None:
        """Note what happens now, or ends now after `seconds`."""
        if len(self._moments) < _MOST_MOMENTS:
            self._moments.append(Moment(time.monotonic() - self._began_s - (seconds or 0.0), what, start, end, seconds))

    def looks_up(self, cache: Cache, match: Match) -> None:
        """The request is about to start with this match. Only its first start is explained."""
        if self._lookup is None:
            self._looked_up_s = time.monotonic()
            with self._publishing.counted():
                self._lookup = cache.explain(match)

    def computed(self, start: int, end: int, seconds: float) -> None:
        """A step has computed these tokens of the prompt."""
        last = self._moments[-1]
        if len(self._moments) >= _MOST_STEPS and last.what == "computes" and last.end == start:
            spent = time.monotonic() - self._began_s - last.at
            self._moments[-1] = Moment(last.at, last.what, last.start, end, spent)
            return
        self.note("computes", start, end, seconds)

    def store_ended(self, outcome: str, found: int = 0) -> None:
        """The store supplies nothing."""
        self.store = StoreAccount(outcome, found)

    def loaded(self, load: Load, mode: str, layers: tuple[LayerTime, ...] = ()) -> None:
        """A load has ended, well or not."""
        end = load.start + load.num_good
        outcome = "loaded" if load.failure is None else "failed"
        self.store = StoreAccount(outcome, load.end, end, load.num_bytes, load.seconds, mode, load.failure)
        self._rows, self._layers = tuple(load.rows), layers
        self._loaded_to = max(self._loaded_to, end)
        what = "loads" if load.failure is None else "load failed"
        self._moments.append(Moment(load.began - self._began_s, what, load.start, end, load.seconds))

    def ends(self, cache: Cache, lease: Lease, request: Request) -> None:
        """A sample of the request is about to give up its lease."""
        if self._breakpoints is None:
            found = cache.inspector.breakpoints(lease, request.breakpoints, request.cached_tokens)
            self._breakpoints = tuple(found)
        evicted = cache.inspector.evicted(lease)
        if evicted is not None and evicted.seconds_ago <= time.monotonic() - self._looked_up_s:
            return  # evicted since then: the request itself had computed it before it was preempted
        if evicted is not None and (self._evicted is None or self._evicted.position < evicted.position):
            self._evicted = evicted

    def record(self, request: Request) -> RequestRecord:
        """The record, after the last sample has ended."""
        self._moments.append(Moment(time.monotonic() - self._began_s, "finished"))
        metrics, received = request.metrics(), request.received
        return RequestRecord(
            request.id,
            self._arrived_at,
            request.samples[0].finish_reason or "abort",
            request.prompt.ids,
            sum(len(sample.token_ids) for sample in request.samples),
            request.cached_tokens,
            request.breakpoints,
            self._breakpoints or (),
            self._spans(request.prompt_tokens, request.cached_tokens, 0 if received is None else received.num_tokens),
            self._lookup,
            self._evicted_in(request.prompt_tokens),
            self.store,
            tuple(sorted(self._moments, key=lambda moment: moment.at)),
            self._rows,
            self._layers,
            self._began_s,
            metrics.queue_s,
            metrics.ttft_s,
            metrics.total_s,
            metrics.per_token_s,
            metrics.preemptions,
            request.adapter,
        )

    def _evicted_in(self, prompt_tokens: int) -> Evicted | None:
        """What the samples found evicted, up to the end of the prompt: their replies may have been evicted too."""
        if self._evicted is None or self._lookup is None:
            return self._evicted
        return self._evicted.in_prompt(prompt_tokens, self._lookup.block_tokens)

    def _spans(self, prompt_tokens: int, cached: int, received: int) -> tuple[Span, ...]:
        memory = 0 if self._lookup is None else min(self._lookup.position, cached)
        ends = [
            (min(received, prompt_tokens), "engine"),
            (memory, "memory"),
            (max(memory, min(cached, self._loaded_to)), "store"),
            (prompt_tokens, "computed"),
        ]
        spans, start = [], 0
        for end, source in ends:
            if end > start:
                spans.append(Span(start, end, source))
                start = end
        return tuple(spans)
