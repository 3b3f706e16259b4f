"""Pushes: parcels on their way from this engine's arena into a consumer's.

One thread advances all of them in turn, a few parcels at a time, so that a slow consumer delays no other. A write that
was posted cannot be stopped: a push is over only when none of its writes is in progress, whatever becomes of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridkv.link.agent import Agent, Write
from hybridkv.link.arena import Arena, Place
from hybridkv.link.errors import LinkMismatch, PeerDown
from hybridkv.link.messages import End, Failed, FirstToken, Message, ParcelLanded, Plan, encode
from hybridkv.link.parcels import Parcel
from hybridkv.link.runs import Cutter, PageTables

LOG = logging.getLogger("hybridkv.link")

_WINDOW = 3
"""Writes of one push that are in progress at a time: by tcp the next checksum is computed while others travel."""
_POLL_S = 0.0001
_LONGEST_POLL_S = 0.005
_IDLE_S = 0.05
"""Time without progress after which polls become rare."""
_LONGEST_WAIT_S = 0.5
"""Without writes in progress the thread waits to be woken; this bounds the wait."""


class Target(NamedTuple):
    """A consumer that has connected."""

    name: str
    """Its name in NIXL."""
    place: Place
    """Its arena."""
    cutter: Cutter


class _Uncut(NamedTuple):
    """Pages whose parcels are cut on the pushing thread."""

    source: PageTables
    wanted: PageTables
    start: int
    end: int


class _Due(NamedTuple):
    parcel: Parcel
    step: int
    number: int
    checksum: int | None
    """None: to be computed before the write, or not at all."""


class Push:
    """One transfer. `add`, `finish` and `fail` are called on any thread, `advance` on the pushing thread."""

    def __init__(
        self,
        agent: Agent,
        arena: Arena,
        target: Target,
        claim: str,
        *,
        checksums: bool,
        parcel_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called on any thread when `advance` has something to do."""
        self.target = target
        self.claim = claim
        self.num_bytes = 0
        self.num_descriptors = 0
        self.checksum_seconds = 0.0
        self.began = time.monotonic()
        self.is_over = False
        self.failure: str | None = None
        self._agent = agent
        self._arena = arena
        self._checksums = checksums
        self._parcel_bytes = parcel_bytes
        self._wake = wake
        self._lock = threading.Lock()
        self._uncut: deque[_Uncut] = deque()
        self._plans: deque[Plan] = deque()
        self._due: deque[_Due] = deque()
        self._writes: list[Write] = []
        self._num_parcels: list[int] = []
        self._first: tuple[FirstToken, ...] | None = None
        self.is_dead = False
        """The consumer cannot be reached."""

    def add(self, source: PageTables, wanted: PageTables, start: int, end: int) -> None:
        """Send tokens [start, end) and, if `source` has them, the states at `end`. The pages hold them already."""
        with self._lock:
            self._uncut.append(_Uncut(source, wanted, start, end))
        self._wake()

    def begin_step(self, source: PageTables, wanted: PageTables, start: int, end: int) -> LayerParcels:
        """As `add`, for pages that a step fills: its parcels are sent layer by layer."""
        cutter, size = self.target.cutter, self._parcel_bytes
        parcels = cutter.parcels(source, wanted, start, end, parcel_bytes=size, by_layer=True)
        with self._lock:
            step = self._begin(source, start, end, by_layer=True, num_parcels=len(parcels))
        self._wake()
        return LayerParcels(self, step, parcels)

    def send(self, step: int, number: int, parcel: Parcel) -> None:
        """Send a parcel now. Its checksum is always computed, and here: its pages may be moved after the step."""
        value = self._arena.checksum(parcel.source, parcel.nbytes)
        with self._lock:
            self._due.append(_Due(parcel, step, number, value))
        self._wake()

    def finish(self, first: Sequence[FirstToken]) -> None:
        """Nothing more is added."""
        with self._lock:
            self._first = tuple(first)
        self._wake()

    def fail(self, reason: str) -> None:
        """Post no more writes. The consumer is told once those in progress have ended."""
        with self._lock:
            self.failure = self.failure or reason
        self._wake()

    def break_off(self, reason: str) -> None:
        """As `fail`, after an error that is not the consumer's. It is not over while writes are in progress."""
        self.fail(reason)
        self.is_over = not self._writes

    def _begin(self, source: PageTables, start: int, end: int, *, by_layer: bool, num_parcels: int) -> int:
        step = len(self._num_parcels)
        self._num_parcels.append(num_parcels)
        self._plans.append(Plan(self.claim, step, start, end, by_layer, self._parcel_bytes, source))
        return step

    @property
    def is_writing(self) -> bool:
        """Whether writes are in progress: only polls tell when they end."""
        return bool(self._writes)

    # --- on the pushing thread ----------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Go on without waiting. Returns whether anything happened."""
        try:
            moved = self._poll()
            if self.failure is not None:
                return self._end_failed() or moved
            while len(self._writes) < _WINDOW and self._post():
                moved = True
            return self._end() or moved
        except PeerDown as error:
            self.is_dead = True
            self.fail(str(error))
            return True
        except LinkMismatch as error:
            self.fail(str(error))
            return True

    def _poll(self) -> bool:
        """Take writes that have ended off the list, failed ones too."""
        before, left, error = len(self._writes), list[Write](), None
        for write in self._writes:
            try:
                if not write.is_done:
                    left.append(write)
            except PeerDown as down:
                error = down
        self._writes = left
        if error is not None:
            raise error
        return len(left) < before

    def _post(self) -> bool:
        self._cut()
        with self._lock:
            plan = self._plans.popleft() if self._plans else None
            due = self._due.popleft() if plan is None and self._due else None
        if plan is not None:
            self._agent.tell(self.target.name, encode(plan))
            return True
        if due is None:
            return False
        parcel, value = due.parcel, due.checksum
        if value is None and self._checksums:
            begin = time.perf_counter()
            value = self._arena.checksum(parcel.source, parcel.nbytes)
            self.checksum_seconds += time.perf_counter() - begin
        message = encode(ParcelLanded(self.claim, due.step, due.number, value))
        name, place = self.target.name, self.target.place
        self._writes.append(self._agent.write(name, place, parcel.source, parcel.target, parcel.nbytes, message))
        self.num_bytes += parcel.total_bytes
        self.num_descriptors += len(parcel.nbytes)
        return True

    def _cut(self) -> None:
        while self._uncut:
            source, wanted, start, end = self._uncut[0]
            parcels = self.target.cutter.parcels(source, wanted, start, end, parcel_bytes=self._parcel_bytes)
            with self._lock:
                step = self._begin(source, start, end, by_layer=False, num_parcels=len(parcels))
                self._due += [_Due(parcel, step, number, None) for number, parcel in enumerate(parcels)]
                self._uncut.popleft()

    def _end(self) -> bool:
        with self._lock:
            if self._first is None or self._uncut or self._plans or self._due or self._writes:
                return False
            message = End(self.claim, tuple(self._num_parcels), self._first)
        return self._say_last(message)

    def _end_failed(self) -> bool:
        if self._writes:
            return False
        assert self.failure is not None
        if self.is_dead:
            self.is_over = True
            return True
        return self._say_last(Failed(self.claim, self.failure))

    def _say_last(self, message: Message) -> bool:
        self.is_over = True
        self._agent.tell(self.target.name, encode(message))
        return True


class LayerParcels:
    """The parcels of one step, which leave when their layer has run. Called on the engine thread."""

    def __init__(self, push: Push, step: int, parcels: Sequence[Parcel]) -> None:
        self._push = push
        self._step = step
        self._left = deque(enumerate(parcels))

    def after_layer(self, layer: int) -> None:
        """Send what layers up to `layer` have filled."""
        while self._left and self._left[0][1].last_layer <= layer:
            number, parcel = self._left.popleft()
            self._push.send(self._step, number, parcel)


class Pusher:
    """The thread that advances pushes."""

    def __init__(self, on_over: Callable[[Push], None]) -> None:
        """`on_over`: called on the pushing thread when a push is over."""
        self._on_over = on_over
        self._changed = threading.Condition()
        self._active: list[Push] = []
        self._is_closed = False
        self._has_news = False
        self._thread = threading.Thread(target=self._run, name="hybridkv-push", daemon=True)
        self._thread.start()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def find(self, claim: str) -> Push | None:
        """The push of a claim, unless it is over."""
        with self._changed:
            return next((push for push in self._active if push.claim == claim), None)

    def is_pushing_to(self, name: str) -> bool:
        """Whether a push to this consumer is not over."""
        with self._changed:
            return any(push.target.name == name for push in self._active)

    def start(self, push: Push) -> None:
        with self._changed:
            self._active.append(push)
            self.wake()

    def wake(self) -> None:
        """A push has something to do."""
        with self._changed:
            self._has_news = True
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Fail all pushes, and give their writes some time to end."""
        with self._changed:
            for push in self._active:
                push.fail("the producer was closed")
            self._is_closed = True
            self.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while True:
            with self._changed:
                while not self._active and not self._is_closed:
                    self._changed.wait()
                if self._is_closed and not self._active:
                    return
                active = list(self._active)
                self._has_news = False
            moved = [self._advance(push) for push in active]
            if any(moved):
                quiet_since = time.monotonic()
            elif any(push.is_writing for push in active):
                idle_s = time.monotonic() - quiet_since
                time.sleep(_LONGEST_POLL_S if idle_s > _IDLE_S else _POLL_S)
            else:
                self._wait()

    def _wait(self) -> None:
        """Until a push has something to do: polls in vain would take the engine's thread its time."""
        with self._changed:
            if not self._has_news:
                self._changed.wait(_LONGEST_WAIT_S)

    def _advance(self, push: Push) -> bool:
        try:
            moved = push.advance()
        except Exception as error:  # a bug, or an error of NIXL that it should not raise: this push alone fails
            moved = push.failure is None
            if moved:
                LOG.exception("a push to %s has failed", push.target.name)
            push.break_off(f"{type(error).__name__}: {error}")
        if push.is_over:
            with self._changed:
                self._active.remove(push)
            self._on_over(push)
        return moved
