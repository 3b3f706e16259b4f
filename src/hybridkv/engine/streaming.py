"""Requests and stores: who loads how much before it computes, what its steps leave, and what becomes of failed loads.

A load is a step of its own, carried out by a store instead of the model (asynchronous), or the first part of a step
that computes the rest, whose layers wait for their rows (layerwise):

    auto        layerwise if nobody else would wait with it, or not for long; asynchronous otherwise
    async       asynchronous always
    layerwise   layerwise always

A load that fails costs its request nothing but time: the request goes back to where it stood, or to the last block that
came whole, and computes the rest. One that hangs keeps its pages until it ends; the request starts anew without them.
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
_ALL_LAYERS = 1 << 30
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
        self._stuck: list[Loading] = []
        """Given up, but still writing into their pages."""
        self._in_step: dict[Sample, Load] = {}
        self._leaving: dict[Sample, list[Outgoing]] = {}
        self._verdicts: list[tuple[Outgoing, bool]] = []
        self._transfers: StepTransfers | None = None

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

    @property
    def has_news(self) -> bool:
        """A load that nobody waits for has ended: its pages can be had again."""
        return any(one.load.is_over for one in (*self._stuck, *self._loading))

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

    def collect(self) -> list[Sample]:
        """Take in what has come. Returns those who must start anew, since their load hangs."""
        adrift = []
        for one in [one for one in self._loading if one.load.is_late or one.load.is_over]:
            self._loading.remove(one)
            self.streamer.ended(one.load, "async")
            if one.load.is_over:
                self._commit(one)
            else:
                adrift.append(self._give_up(one))
        for one in [one for one in self._stuck if one.load.is_over]:
            self._stuck.remove(one)
            self._cache.commit(one.lease, failed=True)
        return [sample for sample in adrift if sample is not None]

    def _commit(self, one: Loading) -> None:
        position = self._cache.commit(one.lease, one.load.num_good)
        if one.sample.lease is one.lease:
            one.sample.loaded(position)

    def _give_up(self, one: Loading) -> Sample | None:
        """Its pages stay with the load. The sample, if it has not ended meanwhile, has no lease any more."""
        self._stuck.append(one)
        if one.sample.lease is not one.lease:
            return None
        self._cache.abort(one.lease)
        one.sample.lease = None
        return one.sample

    def abandon(self, lease: Lease) -> None:
        """Its request has ended: what is not read yet need not be."""
        for one in self._loading:
            if one.lease is lease:
                one.load.give_up("aborted", RequestError("the request was aborted"))

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: Sequence[tuple[Sample, StepTables]]) -> None:
        """A step is about to run: what its layers wait for, and what they leave."""
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
        """All layers have run, or one has failed. Loads have come, have failed, or hang; may be said twice."""
        for load in self._in_step.values():
            load.wait(_ALL_LAYERS)
        if self._transfers is not None:
            self.streamer.stats.wait_seconds += self._transfers.wait_seconds
            self._transfers = None
            self.streamer.settle()

    def has_failed(self, sample: Sample) -> bool:
        """Whether what the step computed for a sample does not count, since its load has failed."""
        return sample in self._in_step and self._in_step[sample].failure is not None

    def hangs(self, sample: Sample) -> bool:
        return sample in self._in_step and not self._in_step[sample].is_over

    def discard(self, sample: Sample) -> bool:
        """Take back the step of a sample whose load has failed. True: it has no lease any more, and starts anew."""
        load, lease = self._in_step[sample], sample.lease
        assert lease is not None
        if load.is_over:
            self._commit(Loading(sample, lease, load))
            return False
        return self._give_up(Loading(sample, lease, load)) is not None

    def judge(self, sample: Sample, counts: bool) -> None:
        """What a sample's step has left is published, or not, when the step has been committed for everyone."""
        if sample in self._in_step:
            sample.loaded(self._in_step[sample].end)
        self._verdicts += [(one, counts) for one in self._leaving.pop(sample, ())]

    def end_step(self) -> None:
        """The step is over for everyone in it. Who was not judged has failed."""
        for load in self._in_step.values():
            self.streamer.ended(load, "layerwise")
        self._in_step = {}
        for sample in list(self._leaving):
            self.judge(sample, False)
        for one, counts in self._verdicts:
            self.streamer.dumper.judge(one, counts)
        self._verdicts = []
