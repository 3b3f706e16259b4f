"""Requests that arrive, wait, compute and decode side by side, so that running ones hold memory as in life.

Prefills go through one queue, first come first served, one at a time; any number of requests decode meanwhile. A
request starts when the cache has room for its prompt, and takes room for its reply as the reply grows. Where a reply
finds none, the youngest decoding request is preempted: its end is kept if it can be, and it waits again in its old
place. The oldest is never preempted by others, so everything ends. A turn does not arrive before the reply it contains
is finished, however slow the service is.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence

from hybridkv.cache import Cache, Lease, NoRoom, could_fit, extend_some
from hybridkv.replay.jobs import Event, Job, Running
from hybridkv.replay.meter import Meter
from hybridkv.replay.room import prefill_step
from hybridkv.replay.serial import Requests, breakpoints, fed_reply
from hybridkv.replay.service import ServiceModel
from hybridkv.replay.traces import TOKEN_BYTES, TraceRequest

_DECODE_STEP = 256
"""Tokens of a reply that take their pages at once."""
_LOOK_AHEAD = 8
"""Waiting requests that are looked at when a prefill starts: do they share its prefix?"""


class Concurrent:
    """One concurrent replay; `run` it once."""

    def __init__(
        self,
        cache: Cache,
        requests: Requests,
        meter: Meter,
        service: ServiceModel,
        *,
        arrivals_s: Sequence[float],
        continued_by: Sequence[int | None],
        prompts_only: bool,
        progress: Callable[[], None],
    ) -> None:
        self.now_s = 0.0
        self._cache = cache
        self._requests = requests
        self._meter = meter
        self._service = service
        self._continued_by = continued_by
        self._prompts_only = prompts_only
        self._progress = progress
        self._events: list[tuple[float, int, Event, int, Running | None]] = []
        self._num_events = 0
        self._waiting: list[Job] = []
        self._early: set[int] = set()
        self._turns_before = [0] * len(requests)
        self._prefilling: Running | None = None
        self._decoding: dict[int, Running] = {}
        self._is_full = False
        """The next to start found no room: it is tried again when something has ended."""
        for turn in continued_by:
            if turn is not None:
                self._turns_before[turn] += 1
        for index, arrival_s in enumerate(arrivals_s):
            self._at(arrival_s, Event.ARRIVAL, index, None)

    def run(self) -> float:
        """Until every request has ended; returns the time that took in the simulation."""
        while self._events:
            self.now_s, _, event, index, running = heapq.heappop(self._events)
            if event is Event.ARRIVAL:
                self._arrive(index)
            elif running is not None and event is Event.PREFILLED:
                self._prefilled(running)
            elif running is not None and self._decoding.get(index) is running:  # else preempted meanwhile
                self._decode(running)
            self._start_next()
        assert not self._waiting
        assert not self._early
        return self.now_s

    def _at(self, time_s: float, event: Event, index: int, running: Running | None) -> None:
        heapq.heappush(self._events, (time_s, self._num_events, event, index, running))
        self._num_events += 1

    # --- arriving and waiting -----------------------------------------------------------------------------------------

    def _arrive(self, index: int) -> None:
        if self._turns_before[index]:
            self._early.add(index)
            return
        job = Job(index, self.now_s)
        self._wait(job)
        if self._prefilling is not None and len(self._waiting) <= _LOOK_AHEAD:
            self._look_for_leader(job)

    def _wait(self, job: Job) -> None:
        insort(self._waiting, job, key=lambda job: job.rank)

    def _look_for_leader(self, job: Job) -> None:
        """If a running request computes its prefix, have it leave a checkpoint where the two part."""
        if not job.computed and self._cache.follow(self._cache.match(self._request(job).prompt)):
            self._meter.followed += not job.follows
            job.follows = True

    def _request(self, job: Job) -> TraceRequest:
        return self._requests[job.index]

    def _start_next(self) -> None:
        while self._waiting and self._prefilling is None and not (self._is_full and self._decoding):
            self._is_full = not self._start(self._waiting[0])

    def _start(self, job: Job) -> bool:
        """Start a job, or refuse it; False: there is no room now."""
        request = self._request(job)
        reply = b"" if self._prompts_only else fed_reply(request)
        if not could_fit(self._cache.layout, request.prompt_tokens + len(reply) // TOKEN_BYTES):
            self._refuse_waiting(job, request)
            return True
        known_reply = max(0, job.computed - request.prompt_tokens) * TOKEN_BYTES
        supply, seen = self._meter.supply_misses(), self._meter.seen.length(request)
        lease = self._cache.begin(request.prompt + reply[:known_reply], breakpoints=breakpoints(request))
        for waiting in self._waiting[1 : 1 + _LOOK_AHEAD]:
            self._look_for_leader(waiting)  # before the step is sent off: it can still be told to keep a state
        if self._no_room_for_prefill(lease):
            self._cache.abort(lease)
            if self._decoding:
                return False
            self._refuse_waiting(job, request)
            return True
        self._waiting.pop(0)
        running = Running(job, request, reply, lease, max(seen, job.computed))
        if not job.computed:
            self._meter.started(request, lease, supply, seen)
            self._meter.queue_waits.append(self.now_s - job.ready_s)
        self._prefill(running)
        return True

    def _refuse_waiting(self, job: Job, request: TraceRequest) -> None:
        self._waiting.remove(job)
        if not job.computed:
            self._meter.never_started(request)
        self._refused(job)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _no_room_for_prefill(self, lease: Lease) -> bool:
        """Take the pages of the next prefill step; True if there are none."""
        num_tokens = prefill_step(self._cache, lease)
        if self._decoding:
            return isinstance(self._cache.extend(lease, num_tokens), NoRoom)
        return isinstance(extend_some(self._cache, lease, num_tokens), NoRoom)

    def _prefill(self, running: Running) -> None:
        """The step that the lease has in flight runs now."""
        step = running.lease.step
        assert step is not None
        self._prefilling = running
        end_s = self.now_s + self._service.prefill_seconds(step.start, step.end)
        self._at(end_s, Event.PREFILLED, running.job.index, running)

    def _prefilled(self, running: Running) -> None:
        self._prefilling = None
        self._commit(running)
        lease = running.lease
        if lease.computed < lease.num_tokens:
            if not self._no_room_for_prefill(lease):
                self._prefill(running)
            elif self._decoding:
                self._preempt(running)
            else:
                self._give_up(running)
            return
        if not running.job.has_first_token:
            running.job.has_first_token = True
            self._meter.first_token_waits.append(self.now_s - running.job.ready_s)
        lease.append(running.reply[max(0, lease.num_tokens - running.request.prompt_tokens) * TOKEN_BYTES :])
        self._decoding[running.job.index] = running
        self._decode(running)

    def _commit(self, running: Running) -> None:
        start = running.lease.computed
        self._cache.commit(running.lease)
        end = running.job.computed = running.lease.computed
        self._meter.computed(start, end, running.before)
        self._meter.seen.add(running.request, end)

    # --- decode -------------------------------------------------------------------------------------------------------

    def _decode(self, running: Running) -> None:
        """Go on with the reply, or end."""
        lease = running.lease
        num_tokens = min(_DECODE_STEP, lease.num_tokens - lease.computed)
        if not num_tokens:
            self._end(running)
            return
        while isinstance(self._cache.extend(lease, num_tokens), NoRoom):
            youngest = max(self._decoding.values(), key=lambda other: other.job.rank)
            if youngest is not running or self._prefilling is not None or len(self._decoding) > 1:
                self._preempt(youngest)
                if youngest is running:
                    return
            elif isinstance(extend_some(self._cache, lease, num_tokens), NoRoom):
                self._give_up(running)
                return
            else:
                break
        start = lease.computed
        self._commit(running)
        end_s = self.now_s + self._service.decode_seconds(lease.computed - start)
        self._at(end_s, Event.DECODED, running.job.index, running)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _preempt(self, running: Running) -> None:
        self._cache.release(running.lease)
        self._decoding.pop(running.job.index, None)
        self._wait(running.job)
        self._meter.preempted += 1
        self._is_full = True

    def _give_up(self, running: Running) -> None:
        self._cache.abort(running.lease)
        self._decoding.pop(running.job.index, None)
        self._refused(running.job)

    def _refused(self, job: Job) -> None:
        self._meter.refused += 1
        self._ended(job)

    def _end(self, running: Running) -> None:
        self._cache.release(running.lease, keep=not self._prompts_only)
        del self._decoding[running.job.index]
        if not self._prompts_only:
            self._meter.output_tokens += running.request.output_tokens
        self._ended(running.job)

    def _ended(self, job: Job) -> None:
        """Room may have come free, and the next turn may arrive."""
        self._is_full = False
        turn = self._continued_by[job.index]
        if turn is not None:
            self._turns_before[turn] -= 1
            if not self._turns_before[turn] and turn in self._early:
                self._early.remove(turn)
                self._arrive(turn)
        self._meter.ended(self.now_s)
        self._progress()
