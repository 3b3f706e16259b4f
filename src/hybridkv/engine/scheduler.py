"""Who computes how many tokens in the next step. No phases: a decoding request is one with a single token to go.

Everyone who decodes gets one token first, so that no prompt holds them up; what is left of the budget goes to prompts,
oldest first, but no further prompt is put into a step that is long enough as it is, and none makes it much longer while
others decode. Where memory runs out the youngest goes back to the queue, in its old place, and what it has computed is
kept if it can be. The oldest is never preempted by others, so everything ends.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from hybridkv.cache import Cache, Lease, Match, NoRoom, StepTables, extend_some
from hybridkv.engine.pace import Pace
from hybridkv.engine.request import Sample
from hybridkv.engine.streaming.store_traffic import Streaming

_LOOK_AHEAD = 32
"""Waiting samples that are looked at in a step: does someone compute their prefix?"""


class Scheduled(NamedTuple):
    """A sample whose step is in flight."""

    sample: Sample
    tables: StepTables


class Scheduler:
    """The queue and the running samples of one cache."""

    def __init__(
        self, cache: Cache, *, max_num_batched_tokens: int, max_num_seqs: int, streaming: Streaming | None = None
    ) -> None:
        self.cache = cache
        self.streaming = streaming
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.pace = Pace()
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.preempted = 0
        self.followed = 0
        """Samples that waited for another request to compute their prefix."""
        self._is_full = False
        """The last to start found no room: nobody else starts until someone has ended."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sample: Sample) -> None:
        """To the queue, in order of arrival; or straight to those that run, if it has a lease (a fork)."""
        insort(self.waiting if sample.lease is None else self.running, sample, key=lambda one: one.rank)

    def remove(self, sample: Sample) -> None:
        """It has ended, at any moment. What it computed stays in the cache, unless a step is in flight."""
        lease, sample.lease = sample.lease, None
        if lease is None:
            if sample in self.waiting:
                self.waiting.remove(sample)
            return
        self.running.remove(sample)
        self._is_full = False
        if lease.in_flight:
            self.cache.abort(lease)
            if self.streaming is not None:
                self.streaming.abandon(sample)
        else:
            self.cache.release(lease)

    def schedule(self) -> tuple[list[Scheduled], list[Sample]]:
        """Send off the next step: what is in it, and who can never go on, even alone. Each sample is in one at most."""
        step: list[Scheduled] = []
        stuck: list[Sample] = []
        for sample in [one for one in self.running if one.is_idle and one.remaining == 1]:
            self._send_off(sample, 1, step, stuck)
        budget = self.max_num_batched_tokens - len(step)
        if step:
            budget = min(budget, self.pace.most_tokens)
        enough = min(budget, self.pace.enough_tokens)
        self._admit(enough)
        fed = 0
        for sample in [one for one in self.running if one.is_idle]:
            if fed < enough and sample.lease is not None and sample not in stuck:
                fed += self._send_off(sample, min(sample.to_compute, budget - fed), step, stuck)
        return step, stuck

    # --- starting -----------------------------------------------------------------------------------------------------

    def _admit(self, enough: int) -> None:
        """Start as many as have enough tokens together; they take no pages yet.

        Each is matched once: the match says whether to wait for another sample, what to ask the store for, and where
        it begins.

        Further ones are looked at all the same: if a prompt that starts now shares their prefix, it must know before
        its step is sent off that a checkpoint is wanted where they part.
        """
        if self._is_full and self.running:
            return
        unfed = sum(one.to_compute for one in self.running)
        for sample in self.waiting[:_LOOK_AHEAD]:
            if len(self.running) >= self.max_num_seqs:
                return
            sample.match = self.cache.match(sample.tokens, sample.request.key)
            is_someone_ahead = unfed or (self.streaming is not None and self.streaming.num_loading)
            if is_someone_ahead and self._follows(sample, sample.match):
                continue
            if self.streaming is not None and not self.streaming.is_ready(sample):
                continue
            if unfed < enough:
                self._start(sample)
                unfed += sample.to_compute

    def _follows(self, sample: Sample, match: Match) -> bool:
        """Whether someone computes the sample's prefix right now, and it pays to wait."""
        if not self.cache.follow(match):
            return False
        self.followed += not sample.has_followed
        sample.has_followed = True
        return True

    def _start(self, sample: Sample) -> None:
        request = sample.request
        self.waiting.remove(sample)
        match, sample.match = sample.match, None
        sample.lease = self.cache.begin(sample.tokens, request.key, breakpoints=request.breakpoints, match=match)
        sample.started()
        if self.streaming is not None:
            self.streaming.started(sample, is_alone=all(one.is_loading for one in self.running))
        insort(self.running, sample, key=lambda one: one.rank)

    # --- pages --------------------------------------------------------------------------------------------------------

    def _send_off(self, sample: Sample, num_tokens: int, step: list[Scheduled], stuck: list[Sample]) -> int:
        """Put a sample's next tokens into the step; returns how many. Others make room for it, or it for others."""
        while sample.lease is not None:
            tables = self._extend(sample, sample.lease, num_tokens)
            if tables is None:
                return 0
            if isinstance(tables, NoRoom) and len(self.running) == 1:
                tables = extend_some(self.cache, sample.lease, num_tokens)
                if isinstance(tables, NoRoom):
                    sample.error = f"no room to go on at token {sample.lease.computed}: {tables.reason}"
                    stuck.append(sample)
                    return 0
            if not isinstance(tables, NoRoom):
                step.append(Scheduled(sample, tables))
                return tables.end - tables.start
            self._preempt(max((one for one in self.running if one.is_idle), key=lambda one: one.rank))
        return 0

    def _extend(self, sample: Sample, lease: Lease, num_tokens: int) -> StepTables | NoRoom | None:
        """Tables for a step, or why there are none. None: it loads first."""
        if self.streaming is not None and sample.load_to > lease.computed:
            tables = self.streaming.extend(sample, num_tokens)
            if tables is not None or lease.in_flight:
                return tables
        return self.cache.extend(lease, num_tokens)

    def _preempt(self, sample: Sample) -> None:
        assert sample.lease is not None
        self.running.remove(sample)
        self.cache.release(sample.lease)
        sample.lease = None
        sample.transfer = None
        sample.preemptions += 1
        self.preempted += 1
        self._is_full = True
        self.add(sample)
