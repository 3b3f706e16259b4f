"""Chooses the samples of the next step and their token counts.

Prefill and decode are not separate phases: a decoding sample is one with a single token to compute.

Decoding samples are scheduled first, one token each, so that prefills do not delay them. The rest of the token budget
goes to prefills, oldest first. `Pace` limits it: no prefill is added to a step that is long enough, and while others
decode no prefill makes the step much longer. Clients take turns in the queue (`Waiting`). When memory runs out, the
youngest sample, the last one that started, is preempted: it returns to the head of the queue, and its computed pages
stay cached if possible. It keeps its age, so a sample is preempted only for those that started before it. The oldest
sample is never preempted for others, so every request finishes.
"""

from __future__ import annotations

import itertools
from bisect import insort
from typing import NamedTuple

from hybridkv.cache import Cache, Lease, Match, NoRoom, StepTables, extend_some
from hybridkv.engine.linking.prefills import Prefills
from hybridkv.engine.linking.receipts import Receipts
from hybridkv.engine.pace import Pace
from hybridkv.engine.request import Sample
from hybridkv.engine.streaming.store_traffic import Streaming
from hybridkv.engine.waiting import Waiting

_LOOK_AHEAD = 32
"""Number of waiting samples matched per step, to see whether a running sample computes their prefix."""


class Scheduled(NamedTuple):
    """A sample whose step is in flight."""

    sample: Sample
    tables: StepTables


class Scheduler:
    """The queue and the running samples of one cache."""

    def __init__(
        self,
        cache: Cache,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        streaming: Streaming | None = None,
        receipts: Receipts | None = None,
        prefills: Prefills | None = None,
    ) -> None:
        self.cache = cache
        self.streaming = streaming
        self.receipts = receipts
        self.prefills = prefills
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.pace = Pace()
        self.waiting = Waiting()
        self.running: list[Sample] = []
        """Oldest first."""
        self._turns = itertools.count(1)
        self.preempted = 0
        self.followed = 0
        """Samples that waited for another request to compute their prefix."""
        self._is_full = False
        """A sample was preempted: no sample is admitted until another has ended."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_samples(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def num_waiting(self) -> int:
        """Number of samples that do not run, n for each prompt that has not been computed."""
        return self.waiting.num_samples + sum(one.request.num_to_fork for one in self.running)

    def num_free_for(self, client: str) -> int:
        """Number of samples that a fork of this client may start at once: it leaves a place to all whose turn it is."""
        return max(0, self.max_num_seqs - len(self.running) - self.waiting.num_ahead(client))

    def only_runs(self, count: int) -> bool:
        """Whether `count` running samples are all that can be scheduled now: no other runs, none can start."""
        may_start = self.waiting and len(self.running) < self.max_num_seqs and not self._is_full
        return len(self.running) == count and not may_start

    def add(self, sample: Sample) -> None:
        """Add to the queue, or to the running samples if it already has a lease (a fork)."""
        if sample.lease is None:
            self.waiting.add(sample)
        else:
            self._run(sample, sample.request.samples[0].turn)

    def _run(self, sample: Sample, turn: int) -> None:
        sample.turn = turn
        insort(self.running, sample, key=lambda one: one.rank)

    def remove(self, sample: Sample) -> None:
        """Remove an ended sample, at any time. Its computed tokens stay cached, unless a step is in flight."""
        lease, sample.lease = sample.lease, None
        arrival, sample.request.arrival = sample.request.arrival, None
        if lease is None:
            self.waiting.discard(sample)
        else:
            self.running.remove(sample)
            self._is_full = False
            self._let_go(sample, lease)
        if arrival is not None and self.receipts is not None:
            self.receipts.abandon(arrival, lease if lease is not None and lease.in_flight else None)

    def _let_go(self, sample: Sample, lease: Lease) -> None:
        if not lease.in_flight:
            self.cache.release(lease)
            return
        self.cache.abort(lease)
        if self.streaming is not None:
            self.streaming.abandon(sample)

    def schedule(self) -> tuple[list[Scheduled], list[Sample]]:
        """Schedule the next step. Returns its samples, and stuck samples: those that cannot continue even alone.

        Each sample is in at most one step at a time.
        """
        step: list[Scheduled] = []
        stuck: list[Sample] = []
        for sample in [one for one in self.running if one.is_idle and one.remaining == 1]:
            self._send_off(sample, 1, step, stuck)
        budget = self.max_num_batched_tokens - len(step)
        if step:
            budget = min(budget, self.pace.most_tokens)
        enough = min(budget, self.pace.enough_tokens)
        asked = self._admit(enough)
        if self.streaming is not None:
            for sample in self.waiting.first(_LOOK_AHEAD):
                if sample not in asked:
                    self.streaming.prefetch(sample)
        self._ask_for_prompts()
        fed = 0
        for sample in [one for one in self.running if one.is_idle]:
            if fed < enough and sample.lease is not None and sample not in stuck:
                fed += self._send_off(sample, min(sample.to_compute, budget - fed), step, stuck)
        return step, stuck

    # --- starting -----------------------------------------------------------------------------------------------------

    def _admit(self, enough: int) -> list[Sample]:
        """Admit waiting samples until they have `enough` tokens to compute. Admission takes no pages yet.

        Returns the samples that wait for nothing but the store's answer: they load as soon as it comes.

        Each sample is matched once. The match decides whether it waits for another sample, what to look up in the
        store, and where it starts.

        Samples beyond `enough` are matched, too: if one shares a prefix with a prompt that is admitted now, that prompt
        must know before its step is scheduled that a checkpoint is wanted where the two diverge.
        """
        asked: list[Sample] = []
        if self._is_full and self.running:
            return asked
        unfed = sum(one.to_compute for one in self.running)
        for sample in self.waiting.first(_LOOK_AHEAD):
            if len(self.running) >= self.max_num_seqs:
                break
            if sample.request.arrival is not None:
                sample.match = None
                self._start(sample)
                continue
            sample.match = self.cache.match(sample.tokens, sample.key)
            is_someone_ahead = unfed or (self.streaming is not None and self.streaming.num_loading)
            if is_someone_ahead and self._follows(sample, sample.match):
                continue
            if self.streaming is not None and not self.streaming.is_ready(sample):
                asked.append(sample)
                continue
            if unfed < enough:
                self._start(sample)
                unfed += sample.to_compute
        return asked

    def _follows(self, sample: Sample, match: Match) -> bool:
        """Whether another sample is computing this one's prefix and waiting for it pays off."""
        if not self.cache.follow(match):
            return False
        if not sample.has_followed:
            self.followed += 1
            sample.request.log.note("waits for another request", end=match.leader_tokens)
        sample.has_followed = True
        return True

    def _start(self, sample: Sample) -> None:
        request = sample.request
        self.waiting.take(sample)
        match, sample.match = sample.match, None
        if match is not None:
            request.log.looks_up(self.cache, match)
        store_room = 0 if self.streaming is None else self.streaming.streamer.num_idle_checkpoints
        sample.lease = self.cache.begin(
            sample.tokens,
            sample.key,
            breakpoints=request.breakpoints,
            match=match,
            store_room=store_room,
            lifetimes=request.prompt.lifetimes,
            client=request.client,
        )
        sample.started()
        if self.streaming is not None:
            self.streaming.started(sample, is_alone=all(one.is_loading for one in self.running))
        self._run(sample, sample.turn or next(self._turns))

    def start_again(self, sample: Sample) -> None:
        """Queue a running sample whose lease is gone."""
        self.running.remove(sample)
        sample.lease = None
        self.add(sample)

    def _ask_for_prompts(self) -> None:
        """Claim prompts of other engines, as far as there is room for them. Without any hope they are computed here."""
        if self.receipts is None:
            return
        for sample in self.running:
            arrival, lease = sample.request.arrival, sample.lease
            if arrival is None or arrival.is_over or lease is None or lease.in_flight:
                continue
            no_room = self.receipts.claim(sample)
            if no_room is not None:
                if not any(one.is_idle or (one.lease and one.lease.in_flight) for one in self.running):
                    self.receipts.give_up(arrival, f"no room for the prompt: {no_room.reason}")
                return

    # --- pages --------------------------------------------------------------------------------------------------------

    def _send_off(self, sample: Sample, num_tokens: int, step: list[Scheduled], stuck: list[Sample]) -> int:
        """Add a sample's next tokens to the step; returns how many. Preempts the youngest if there is no room."""
        while sample.lease is not None:
            tables = self._extend(sample, sample.lease, num_tokens)
            if tables is None:
                return 0
            if isinstance(tables, NoRoom) and len(self.running) == 1:
                if self.prefills is not None and self.prefills.withdraw_oldest():
                    continue
                tables = extend_some(self.cache, sample.lease, num_tokens)
                if isinstance(tables, NoRoom) and self.receipts is not None and self.receipts.num_quarantined:
                    return 0  # pages become free when their producers have ended
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
        """Tables for a step, or NoRoom with the reason. None: the sample loads asynchronously first."""
        if self.streaming is not None and sample.load_to > lease.computed:
            tables = self.streaming.extend(sample, num_tokens)
            if tables is not None or lease.in_flight:
                return tables
        return self.cache.extend(lease, num_tokens)

    def _preempt(self, sample: Sample) -> None:
        assert sample.lease is not None
        computed = sample.lease.computed
        self.running.remove(sample)
        self.cache.release(sample.lease)
        sample.lease = None
        sample.transfer = None
        sample.preemptions += 1
        sample.request.log.note("preempted", end=computed)
        self.preempted += 1
        self._is_full = True
        self.add(sample)
