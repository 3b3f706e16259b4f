"""Requests and stores: who loads how much before it computes, what its steps leave, and what becomes of failed loads.

A load is a step of its own, carried out by a store instead of the model (asynchronous), or the first part of a step
that computes the rest, whose layers wait for their rows (layerwise):

    auto        layerwise if nobody else would wait with it, or not for long; asynchronous otherwise
    async       asynchronous always
    layerwise   layerwise always

A load that fails, hangs or is aborted costs its request nothing but time: the request goes back to where it stood, or
to the last block that came whole, and computes the rest. Its pages can be used again at once, also while a read hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridkv.cache import Cache, Lease, NoRoom, StepTables
from hybridkv.engine.dumps import Dumps
from hybridkv.engine.request import Sample
from hybridkv.engine.seams import Frame
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.stream import Load, Outgoing, StepTransfers, Streamer

STREAM_MODES = ("auto", "async", "layerwise")
_LONG_WAIT_S = 2.0
"""Nobody is there to wait with a request that loads layerwise, but someone may come."""
_SHORT_WAIT_S = 0.005


def check_streaming(mode: str, load_timeout_s: float, *, has_store: bool) -> None:
    if mode not in STREAM_MODES:
        raise HybridKVError(f"stream {mode!r}: choose {', '.join(STREAM_MODES)}")
    if mode != "auto" and not has_store:
        raise HybridKVError(
            f"stream {mode!r} without a store: there is nothing to load from; name a store, or leave it out"
        )
    if not isinstance(load_timeout_s, (int, float)) or not load_timeout_s > 0:
        raise HybridKVError(f"load_timeout_s {load_timeout_s!r}: a load needs some time; leave it out for a default")


class Loading(NamedTuple):
    """A load that is a step of its own."""

    sample: Sample
    lease: Lease
    load: Load


class Streaming:
    """Between one scheduler's samples and one streamer."""

    def __init__(self, streamer: Streamer, cache: Cache, mode: str = "auto") -> None:
        self.streamer = streamer
        self.mode = mode
        self.dumps = Dumps(streamer, cache.layout)
        self._cache = cache
        self._loading: list[Loading] = []
        self._in_step: dict[Sample, Load] = {}
        self._leaving: dict[Sample, list[Outgoing]] = {}
        self._verdicts: list[tuple[Outgoing, bool]] = []
        self._transfers: StepTransfers | None = None
        self._begun: Sequence[tuple[Sample, StepTables]] = ()

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def is_busy(self) -> bool:
        """Whether something is loaded: beside the present step, or for it."""
        return bool(self._loading or self._in_step)

    def is_loading(self, sample: Sample) -> bool:
        """Whether it waits for a load that is a step of its own."""
        return any(one.sample is sample for one in self._loading)

    # --- before a request starts --------------------------------------------------------------------------------------

    def is_ready(self, sample: Sample) -> bool:
        """Whether it is known what the store has for a sample that waits. Asks when it is first asked."""
        if not sample.has_asked:
            sample.has_asked = True
            request = sample.request
            match = self._cache.match(sample.tokens, salt=request.salt, extra_keys=request.extra_keys)
            limit = len(sample.tokens) // 4 - 1
            sample.fetch = self.streamer.find(sample.keys(self.streamer), sample.tokens, match.num_tokens, limit)
        if sample.fetch is None:
            return True
        if sample.fetch.is_late:
            self.streamer.stats.slow_lookups += 1
            sample.fetch = None
            return True
        return sample.fetch.is_answered

    def started(self, sample: Sample, *, is_alone: bool) -> None:
        """A sample has a lease now: begin to load, or note how far its first step shall."""
        fetch, sample.fetch, lease = sample.fetch, None, sample.lease
        assert lease is not None
        if fetch is None:
            return
        self.streamer.stats.failed_lookups += fetch.has_failed
        if fetch.position <= lease.computed:
            return
        self.streamer.stats.found += 1
        if self._is_layerwise(lease.computed, fetch.position, is_alone):
            sample.load_to = fetch.position
            return
        self._load_alone(sample, lease, fetch.position)

    def _is_layerwise(self, start: int, end: int, is_alone: bool) -> bool:
        """Whether layers shall wait for rows. Everyone in the batch waits with them, and everyone who arrives."""
        if self.mode != "auto":
            return self.mode == "layerwise"
        seconds = self.streamer.predicted_seconds(start, end)
        if seconds is None:
            return is_alone
        return seconds < (_LONG_WAIT_S if is_alone else _SHORT_WAIT_S)

    def _load_alone(self, sample: Sample, lease: Lease, position: int) -> None:
        count = position - lease.computed
        tables = self._cache.extend(lease, count, num_loaded=count)
        if not isinstance(tables, NoRoom):
            load = self.streamer.load(tables, sample.keys(self.streamer), lease.tokens)
            self._loading.append(Loading(sample, lease, load))

    def extend(self, sample: Sample, num_tokens: int) -> StepTables | None:
        """A step of up to `num_tokens` computed tokens, after those that are loaded first.

        None: there is no room for both. It loads by itself then, or not at all if there is no room for that either.
        """
        lease, position, sample.load_to = sample.lease, sample.load_to, 0
        assert lease is not None
        num_loaded = position - lease.computed
        count = num_loaded + min(num_tokens, lease.num_tokens - position)
        tables = self._cache.extend(lease, count, num_loaded=num_loaded)
        if isinstance(tables, NoRoom):
            self._load_alone(sample, lease, position)
            return None
        self._in_step[sample] = self.streamer.load(tables, sample.keys(self.streamer), lease.tokens)
        return tables

    # --- loads that are steps of their own ----------------------------------------------------------------------------

    def collect(self) -> None:
        """Commit the loads that have come, have failed or are late."""
        for one in list(self._loading):
            one.load.expire()
            if one.load.is_over:
                self._end(one)

    def abandon(self, lease: Lease) -> None:
        """The request of an aborted lease has ended: end its load, so that its pages are free."""
        for one in [one for one in self._loading if one.lease is lease]:
            one.load.give_up("aborted", RequestError("the request was aborted"))
            self._end(one)

    def _end(self, one: Loading) -> None:
        self._loading.remove(one)
        self.streamer.ended(one.load, "async")
        self._commit(one)

    def _commit(self, one: Loading) -> None:
        position = self._cache.commit(one.lease, one.load.num_good)
        if one.sample.lease is one.lease:
            one.sample.loaded(position)

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: Sequence[tuple[Sample, StepTables]]) -> None:
        """A step is about to run: collect what its layers wait for, and what they leave.

        A second call with the same step changes nothing. A call with another one, although the first never ran,
        discards what the first would have left, and counts it.
        """
        if self._transfers is not None and scheduled == self._begun:
            return
        self._publish()
        self._begun = scheduled
        self._transfers = StepTransfers(self.streamer.dumper, list(self._in_step.values()))
        for sample, tables in scheduled:
            for one in self.dumps.of_step(sample, tables):
                self._leaving.setdefault(sample, []).append(one)
                self._transfers.add(one)

    def before_layer(self, layer: int, frame: Frame) -> None:
        if self._transfers is not None:
            self._transfers.before_layer(layer)

    def after_layer(self, layer: int, frame: Frame, hidden: torch.Tensor) -> None:
        if self._transfers is not None:
            self._transfers.after_layer(layer)

    def ran(self) -> None:
        """All layers have run, or one has failed: end the step's loads. A second call does nothing."""
        for load in self._in_step.values():
            load.finish()
        if self._transfers is not None:
            self.streamer.stats.wait_seconds += self._transfers.wait_seconds
            self._transfers = None
            self.streamer.settle()

    def has_failed(self, sample: Sample) -> bool:
        """Whether what the step computed for a sample does not count, since its load has failed."""
        return sample in self._in_step and self._in_step[sample].failure is not None

    def discard(self, sample: Sample) -> None:
        """Take back the step of a sample whose load has failed, but for the tokens that were loaded whole."""
        assert sample.lease is not None
        self._commit(Loading(sample, sample.lease, self._in_step[sample]))

    def judge(self, sample: Sample, counts: bool) -> None:
        """What a sample's step has left is published, or not, when the step has been committed for everyone."""
        if sample in self._in_step:
            sample.loaded(self._in_step[sample].end)
        self._decide(sample, counts)

    def end_step(self) -> None:
        """The step is over for everyone in it. A sample that was not judged has failed."""
        for load in self._in_step.values():
            self.streamer.ended(load, "layerwise")
        self._in_step = {}
        self._begun = ()
        self._publish()

    def _publish(self) -> None:
        """Publish what was judged good. Everything else that the step would have left is discarded."""
        for sample in list(self._leaving):
            self._decide(sample, False)
        for one, counts in self._verdicts:
            self.streamer.dumper.judge(one, counts)
        self._verdicts = []

    def _decide(self, sample: Sample, counts: bool) -> None:
        self._verdicts += [(one, counts) for one in self._leaving.pop(sample, ())]
