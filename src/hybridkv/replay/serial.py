"""One request after the other: what the cache can do without concurrency, and how caches are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hybridkv.cache import Cache, Lease, NoRoom, could_fit, extend_some
from hybridkv.replay.meter import Meter
from hybridkv.replay.room import prefill_step
from hybridkv.replay.traces import TOKEN_BYTES, TraceRequest


class Requests(Protocol):
    """A trace, or its conversations."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> TraceRequest: ...


def replay_serial(
    cache: Cache, requests: Requests, meter: Meter, *, prompts_only: bool, progress: Callable[[], None]
) -> None:
    """Begin, compute and release each request before the next. `progress` is called after each."""
    for index in range(len(requests)):
        request = requests[index]
        _serve(cache, request, meter, prompts_only=prompts_only)
        meter.ended(index + 1)
        progress()


def fed_reply(request: TraceRequest) -> bytes:
    """The part of a reply that is computed: the last token is sampled and never fed."""
    return request.reply[: max(0, request.output_tokens - 1) * TOKEN_BYTES]


def breakpoints(request: TraceRequest) -> Sequence[int]:
    """Where the prompt may be continued, if not at its end; never what only later requests tell."""
    return (request.known_tokens,) if request.known_tokens < request.prompt_tokens else ()


def _serve(cache: Cache, request: TraceRequest, meter: Meter, *, prompts_only: bool) -> None:
    """Without its reply, a prompt leaves nothing at its very end: what would go on from there is not known."""
    reply = b"" if prompts_only else fed_reply(request)
    num_tokens = request.prompt_tokens + len(reply) // TOKEN_BYTES
    if not could_fit(cache.layout, num_tokens):
        meter.refused += 1
        meter.never_started(request)
        return
    supply, seen = meter.supply_misses(), meter.seen.length(request)
    lease = cache.begin(request.prompt, breakpoints=breakpoints(request))
    meter.started(request, lease, supply, seen)
    if not _compute(cache, lease, request, meter, seen):
        return
    if reply:
        lease.append(reply)
        if not _compute(cache, lease, request, meter, lease.computed):
            return
    meter.output_tokens += 0 if prompts_only else request.output_tokens
    cache.release(lease, keep=not prompts_only)


def _compute(cache: Cache, lease: Lease, request: TraceRequest, meter: Meter, before: int) -> bool:
    """Compute all that is known; False: there was no room, and the request is gone."""
    while lease.computed < lease.num_tokens:
        step = extend_some(cache, lease, prefill_step(cache, lease))
        if isinstance(step, NoRoom):
            cache.abort(lease)
            meter.refused += 1
            return False
        cache.commit(lease)
        meter.computed(step.start, lease.computed, before)
        meter.seen.add(request, lease.computed)
    return True
