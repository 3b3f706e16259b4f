"""Requests that arrive, wait, compute and decode side by side, so that running ones hold memory as in life.

Prefills go through one queue, first come first served, one at a time; any number of requests decode meanwhile. A
request starts when the cache has room for its prompt, and takes room for its reply as the reply grows. Where a reply
finds none, the youngest decoding request is preempted: its end is kept if it can be, and it waits again in its old
place. The oldest is never preempted by others, so everything ends. A turn does not arrive before the reply it contains
is finished, however slow the service is.

A request that finds more in a tier than in memory loads it first. It holds its pages meanwhile, and others compute: any
number of requests load at the same time, on the tiers' bandwidth. Its prefill comes next, before those that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hybridkv.cache import Cache, NoRoom, StepTables, could_fit, extend_some
from hybridkv.replay.jobs import Event, Events, Job, Running, Turns
from hybridkv.replay.loading import Loading
from hybridkv.replay.meter import Meter
from hybridkv.replay.room import prefill_step
from hybridkv.replay.serial import Requests, fed_reply
from hybridkv.replay.service import ServiceModel
from hybridkv.replay.tiers.tiers import Tiers
from hybridkv.replay.traces import TOKEN_BYTES, TraceRequest
from hybridkv.replay.waiting import Waiting

_DECODE_STEP = 256
"""Tokens of a reply that take their pages at once."""


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
        tiers: Tiers | None = None,
    ) -> None:
        self.now_s = 0.0
        self._cache = cache
        self._meter = meter
        self._service = service
        self._prompts_only = prompts_only
        self._progress = progress
        self._events = Events()
        self._turns = Turns(continued_by)
        self._loads = Loading(cache, tiers)
        self._waiting = Waiting(cache, requests, meter, self._loads)
        self._prefilling: Running | None = None
        self._decoding: dict[int, Running] = {}
        self._is_full = False
        """The next to start found no room: it is tried again when something has ended."""
        for index, arrival_s in enumerate(arrivals_s):
            self._events.add(arrival_s, Event.ARRIVAL, index, None)

    def run(self) -> float:
        """Until every request has ended; returns the time that took in the simulation."""
        while len(self._events):
            self.now_s, event, index, running = self._events.take()
            if event is Event.ARRIVAL:
                self._arrive(index)
            elif running is not None and event is Event.PREFILLED:
                self._prefilled(running)
            elif running is not None and event is Event.LOADED:
                self._loads.end(running, self.now_s)
            elif running is not None and self._decoding.get(index) is running:  # else preempted meanwhile
                self._decode(running)
            self._start_next()
        assert not len(self._waiting)
        assert not self._turns.early
        return self.now_s

    # --- arriving and waiting -----------------------------------------------------------------------------------------

    def _arrive(self, index: int) -> None:
        if self._turns.is_early(index):
            return
        self._waiting.arrived(Job(index, self.now_s), is_prefilling=self._prefilling is not None)

    @property
    def _others_hold_pages(self) -> bool:
        """Whether pages will come free without a request that waits."""
        return bool(self._decoding or len(self._loads))

    def _start_next(self) -> None:
        while self._prefilling is None and (loaded := self._loads.next_loaded()) is not None:
            self._go_on(loaded)
        while self._prefilling is None and not (self._is_full and self._others_hold_pages):
            job = self._waiting.next()
            if job is None:
                return
            self._is_full = not self._start(job)

    def _start(self, job: Job) -> bool:
        """Start a job, or refuse it; False: there is no room now."""
        request = self._waiting.request(job)
        reply = b"" if self._prompts_only else fed_reply(request)
        if not could_fit(self._cache.layout, request.prompt_tokens + len(reply) // TOKEN_BYTES):
            self._refuse_waiting(job, request)
            return True
        known_reply = max(0, job.computed - request.prompt_tokens) * TOKEN_BYTES
        supply, seen = self._meter.supply_misses(), self._meter.seen.length(request)
        prompt, store_room = request.prompt + reply[:known_reply], self._loads.num_idle_checkpoints
        lease = self._cache.begin(prompt, breakpoints=request.all_breakpoints, store_room=store_room)
        self._waiting.look_for_leaders(job)
        stored = self._loads.tiered(request, reply)
        running = Running(job, request, reply, lease, max(seen, job.computed), stored)
        loaded_s = self._loads.begin(running, self.now_s)
        if loaded_s is None and self._no_room_for_prefill(running):
            self._cache.abort(lease)
            if self._others_hold_pages:
                return False
            self._refuse_waiting(job, request)
            return True
        self._waiting.remove(job)
        if not job.has_started:
            job.has_started = True
            self._meter.started(request, lease, supply, seen, running.load)
            self._meter.queue_waits.append(self.now_s - job.ready_s)
        if loaded_s is None:
            self._prefill(running)
        else:
            self._events.add(loaded_s, Event.LOADED, job.index, running)
        return True

    def _refuse_waiting(self, job: Job, request: TraceRequest) -> None:
        self._waiting.remove(job)
        if not job.has_started:
            self._meter.never_started(request)
        self._refused(job)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _no_room_for_prefill(self, running: Running) -> bool:
        """Take the pages of the next prefill step; True if there are none."""
        cache, lease = self._cache, running.lease
        num_tokens = prefill_step(cache, lease)
        extend = cache.extend if self._others_hold_pages else partial(extend_some, cache)
        tables = extend(lease, num_tokens)
        running.tables = None if isinstance(tables, NoRoom) else tables
        return running.tables is None

    def _prefill(self, running: Running) -> None:
        """The step that the lease has in flight runs now."""
        step = running.lease.step
        assert step is not None
        self._prefilling = running
        end_s = self.now_s + self._service.prefill_seconds(step.start, step.end)
        self._events.add(end_s, Event.PREFILLED, running.job.index, running)

    def _prefilled(self, running: Running) -> None:
        self._prefilling = None
        self._commit(running, running.tables)
        lease = running.lease
        if lease.computed < lease.num_tokens:
            self._go_on(running)
            return
        if not running.job.has_first_token:
            running.job.has_first_token = True
            self._meter.first_token_waits.append(self.now_s - running.job.ready_s)
        lease.append(running.reply[max(0, lease.num_tokens - running.request.prompt_tokens) * TOKEN_BYTES :])
        self._decoding[running.job.index] = running
        self._decode(running)

    def _go_on(self, running: Running) -> None:
        """The next step of a prefill."""
        if not self._no_room_for_prefill(running):
            self._prefill(running)
        elif self._others_hold_pages:
            self._preempt(running)
        else:
            self._give_up(running)

    def _commit(self, running: Running, tables: StepTables | None) -> None:
        assert tables is not None
        start = running.lease.computed
        self._cache.commit(running.lease)
        end = running.job.computed = running.lease.computed
        self._meter.computed(start, end, running.before)
        self._meter.seen.add(running.request, end)
        if running.stored is not None:
            running.stored.stepped(running.lease, tables, self.now_s)

    # --- decode -------------------------------------------------------------------------------------------------------

    def _decode(self, running: Running) -> None:
        """Go on with the reply, or end."""
        lease = running.lease
        num_tokens = min(_DECODE_STEP, lease.num_tokens - lease.computed)
        if not num_tokens:
            self._end(running)
            return
        while isinstance(tables := self._cache.extend(lease, num_tokens), NoRoom):
            youngest = max(self._decoding.values(), key=lambda other: other.job.rank)
            is_alone = len(self._decoding) == 1 and not (self._prefilling or len(self._loads))
            if not is_alone:
                self._preempt(youngest)
                if youngest is running:
                    return
                continue
            tables = extend_some(self._cache, lease, num_tokens)
            if isinstance(tables, NoRoom):
                self._give_up(running)
                return
            break
        start = lease.computed
        self._commit(running, tables)
        end_s = self.now_s + self._service.decode_seconds(lease.computed - start)
        self._events.add(end_s, Event.DECODED, running.job.index, running)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _preempt(self, running: Running) -> None:
        self._cache.release(running.lease)
        self._decoding.pop(running.job.index, None)
        self._waiting.add(running.job)
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
        if running.stored is not None and not self._prompts_only:
            running.stored.ended(running.lease, self.now_s)
        self._cache.release(running.lease, keep=not self._prompts_only)
        del self._decoding[running.job.index]
        if not self._prompts_only:
            self._meter.output_tokens += running.request.output_tokens
        self._ended(running.job)

    def _ended(self, job: Job) -> None:
        """Room may have come free, and the next turn may arrive."""
        self._is_full = False
        turn = self._turns.ended(job.index)
        if turn is not None:
            self._arrive(turn)
        self._meter.ended(self.now_s)
        self._progress()
