"""One prompt that another engine computes and sends here, from the request's arrival to its last byte.

    WAITING ──► CLAIMED ──► DONE          all parcels have landed and were verified
       │           │
       └───────────┴──────► FAILED        refused, timed out, corrupt, producer lost, given up

The target pages of a failed arrival are quarantined until it is settled: the producer has said that none of its writes
is in progress, or it is dead. A write that was posted cannot be stopped from here.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from hybridkv.link.arena import Arena
from hybridkv.link.errors import LinkError
from hybridkv.link.messages import End, Failed, FirstToken, Message, ParcelLanded, Plan
from hybridkv.link.parcels import Parcel
from hybridkv.link.peers import Peer
from hybridkv.link.runs import PageTables


class Stage(Enum):
    WAITING = "waiting"
    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a claim asks for: pages of the tokens [start, end) of a prompt, and of the states at `end`."""

    start: int
    end: int
    pages: PageTables
    digest: str
    """Digest of the prompt's tokens and lookup key."""
    sampling: str
    """Digest of the parameters that the first token depends on."""
    is_plain: bool
    """Full attention only: tokens before a corrupt parcel are of use."""


@dataclass(slots=True)
class _Step:
    start: int
    end: int
    parcels: Sequence[Parcel]
    landed: set[int] = field(default_factory=set)
    """Numbers of those that have landed. A message that comes twice counts once."""


class Arrival:
    """Thread-safe. The consumer changes it; the engine reads it."""

    def __init__(self, peer: Peer, request_id: str, *, is_early: bool) -> None:
        self.peer = peer
        self.request_id = request_id
        self.is_early = is_early
        self.id = secrets.token_hex(16)
        """Names its claim, in all messages of the producer."""
        self.stage = Stage.WAITING
        self.failure: str | None = None
        """Kind of failure: docs/disaggregation.md lists them."""
        self.reason = ""
        self.is_settled = True
        """Whether no write of the producer can reach its pages any more."""
        self.wanted: Wanted | None = None
        self.first: tuple[FirstToken, ...] = ()
        self.num_bytes = 0
        self.num_descriptors = 0
        self.full_attention_bytes = 0
        self.claimed_at = 0.0
        self.seconds = 0.0
        """From the claim to the last byte."""
        self.deadline = float("inf")
        self.verify_seconds = 0.0
        self.engine_id = ""
        """The engine that its claim was sent to."""
        self.is_asking = False
        """Its claim is being sent: it cannot be settled before the answer."""
        self.is_settling = False
        """The producer is being asked whether it is settled."""
        self.next_settle = 0.0
        """When to ask again whether it is settled."""
        self._is_counted = False
        self._lock = threading.RLock()
        self._good_until = 0
        self._steps: dict[int, _Step] = {}
        self._early_notes: list[ParcelLanded] = []
        self._end: End | None = None

    @property
    def start(self) -> int:
        return 0 if self.wanted is None else self.wanted.start

    @property
    def end(self) -> int:
        return 0 if self.wanted is None else self.wanted.end

    @property
    def is_over(self) -> bool:
        return self.stage in (Stage.DONE, Stage.FAILED)

    @property
    def num_good(self) -> int:
        """Number of tokens that came correctly. Valid once it is over."""
        if self.stage is Stage.DONE:
            return self.end - self.start
        return max(0, self._good_until - self.start) if self.failure == "corrupt" else 0

    def claimed(self, wanted: Wanted, timeout_s: float) -> bool:
        """The claim is about to be sent. From now on the producer may write to its pages. False: it has failed."""
        with self._lock:
            if self.is_over:
                return False
            self.is_asking = True
            self.wanted, self.stage, self.is_settled = wanted, Stage.CLAIMED, False
            self._good_until = wanted.end
            self.claimed_at = time.monotonic()
            self.deadline = self.claimed_at + timeout_s
            return True

    def fail(self, kind: str, reason: str, *, is_settled: bool = False) -> None:
        """Give up, unless it is over. `is_settled`: no write is in progress."""
        with self._lock:
            self.is_settled = self.is_settled or is_settled
            if not self.is_over:
                self.stage, self.failure, self.reason = Stage.FAILED, kind, reason

    def settle(self) -> None:
        with self._lock:
            self.is_settled = True

    def count_once(self) -> bool:
        """True at the first call."""
        with self._lock:
            was, self._is_counted = self._is_counted, True
            return not was

    # --- messages of the producer, on the link's thread ---------------------------------------------------------------

    def hear(self, message: Message, arena: Arena) -> None:
        """Take a message. Raises LinkError if it cannot be one of the producer's."""
        with self._lock:
            if isinstance(message, Failed):
                self.fail("producer", message.reason, is_settled=True)
                return
            if isinstance(message, End):
                self.is_settled = True
                self._end = message
            elif self.is_over:
                return
            elif isinstance(message, Plan):
                self._plan(message, arena)
            else:
                self._landed(message, arena)
            self._check_done()

    def _plan(self, plan: Plan, arena: Arena) -> None:
        assert self.wanted is not None
        if not self.start <= plan.start <= plan.end <= self.end:
            raise LinkError(f"a plan of tokens {plan.start} to {plan.end}, where {self.start} to {self.end} are wanted")
        if plan.step in self._steps:
            return
        wanted, cutter = self.wanted.pages, self.peer.cutter
        if plan.end < self.end:
            wanted = PageTables(wanted.tables, {})
        parcels = cutter.parcels(
            plan.pages, wanted, plan.start, plan.end, parcel_bytes=plan.parcel_bytes, by_layer=plan.by_layer
        )
        self._steps[plan.step] = _Step(plan.start, plan.end, parcels)
        notes, self._early_notes = self._early_notes, []
        for note in notes:
            self._landed(note, arena)

    def _landed(self, note: ParcelLanded, arena: Arena) -> None:
        step = self._steps.get(note.step)
        if step is None:
            self._early_notes.append(note)
            return
        if not 0 <= note.number < len(step.parcels):
            raise LinkError(f"parcel {note.number} of a step with {len(step.parcels)}")
        parcel = step.parcels[note.number]
        if note.number in step.landed:
            return
        step.landed.add(note.number)
        self.num_bytes += parcel.total_bytes
        self.num_descriptors += len(parcel.nbytes)
        if note.checksum is not None:
            begin = time.perf_counter()
            is_good = arena.checksum(parcel.target, parcel.nbytes) == note.checksum
            self.verify_seconds += time.perf_counter() - begin
            if not is_good:
                self._lose(parcel)

    def _lose(self, parcel: Parcel) -> None:
        assert self.wanted is not None
        first = parcel.first_token if self.wanted.is_plain else self.start
        self._good_until = min(self._good_until, max(self.start, first))
        self.failure = "corrupt"
        self.reason = f"a parcel of group {parcel.group} does not have the checksum that its producer computed"

    def _check_done(self) -> None:
        """After the end, with all parcels: done, or failed if one was corrupt."""
        if self._end is None or self.is_over:
            return
        position = self.start
        for number, count in enumerate(self._end.num_parcels):
            step = self._steps.get(number)
            if step is None or len(step.landed) < count:
                return
            position = step.end if step.start <= position else -1
        if position != self.end:
            raise LinkError(f"an end, although the steps do not cover tokens {self.start} to {self.end}")
        self.first = self._end.first
        self.seconds = time.monotonic() - self.claimed_at
        self.stage = Stage.DONE if self.failure is None else Stage.FAILED
