"""Traffic between requests and stores: what a request loads, what its steps dump, and how failed loads are handled.

An asynchronous load is a step of its own that the store carries out instead of the model. A layerwise load is the first
part of a step that computes the rest; each layer of that step waits for its rows. If the rows are late and other
requests wait, the step's result for the sample is discarded, and the load goes on as an asynchronous one.

    auto        layerwise if no other request would wait with it, or only briefly; asynchronous otherwise
    async       always asynchronous
    layerwise   always layerwise

A load that fails, hangs or is aborted costs its request only time. The request resumes from the last block that was
loaded completely (or from its position before the load) and computes the rest. Its pages can be reused at once, even
while a read hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hybridkv.cache import Cache, Lease, NoRoom, StepTables
from hybridkv.cache.tokens import TOKEN_BYTES
from hybridkv.engine.request import Sample
from hybridkv.engine.seams import Frame
from hybridkv.engine.streaming.page_requests import load_request, reply_request, step_progress, step_request
from hybridkv.engine.streaming.transfer import Stage, Transfer
from hybridkv.errors import InputError, RequestError
from hybridkv.stream import DumpPoint, DumpRule, Load, Outgoing, StepTransfers, Streamer

STREAM_MODES = ("auto", "async", "layerwise")
_LONG_WAIT_S = 2.0
"""Longest predicted layerwise load while no other request runs."""
_SHORT_WAIT_S = 0.005
"""Longest predicted layerwise load while other requests run and wait with it."""


def check_streaming(mode: str, load_timeout_s: float, *, has_store: bool) -> None:
    if mode not in STREAM_MODES:
        raise InputError(f"stream {mode!r}: choose {', '.join(STREAM_MODES)}")
    if mode != "auto" and not has_store:
        raise InputError(
            f"stream {mode!r} without a store: there is nothing to load from; name a store, or leave it out"
        )
    if not isinstance(load_timeout_s, (int, float)) or not load_timeout_s > 0:
        raise InputError(f"load_timeout_s {load_timeout_s!r}: a load needs some time; leave it out for a default")


class Streaming:
    """Connects the samples of one scheduler with one streamer."""

    def __init__(self, streamer: Streamer, cache: Cache, mode: str = "auto") -> None:
        self.streamer = streamer
        self.mode = mode
        self.others_wait: Callable[[], bool] | None = None
        """Whether requests wait for the current step besides the one that loads in it. None: none ever does."""
        self._cache = cache
        self._rule = DumpRule(streamer.catalogue)
        self._loading: list[Sample] = []
        """Samples with an asynchronous load."""
        self._step: StepTransfers | None = None
        """The current step's transfers. Set by the first layerwise load or by `begin_step`, cleared by `end_step`."""
        self._begun: Sequence[tuple[Sample, StepTables]] | None = None
        """The argument of `begin_step` for the current step."""

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def is_busy(self) -> bool:
        """Whether a load is in progress, asynchronous or in the current step."""
        return bool(self._loading or (self._step is not None and self._step.loads))

    # --- before a request starts --------------------------------------------------------------------------------------

    def is_ready(self, sample: Sample) -> bool:
        """Whether the store has answered the lookup for a waiting sample. The first call starts the lookup."""
        if sample.transfer is None or _is_outdated(sample, sample.transfer):
            sample.transfer = self._ask(sample)
        transfer = sample.transfer
        if transfer.stage is not Stage.ASKED:
            return True
        assert transfer.fetch is not None
        if transfer.fetch.is_late:
            self.streamer.stats.slow_lookups += 1
            sample.request.log.store_ended("slow")
            transfer.end()
            return True
        return transfer.fetch.is_answered

    def prefetch(self, sample: Sample) -> None:
        """Called in each step for a sample that cannot start: tiers copy its objects to the fastest one meanwhile."""
        if not self.streamer.store.can_prefetch or sample.request.arrival is not None or sample.has_followed:
            return
        if sample.transfer is None:
            sample.match = self._cache.match(sample.tokens, sample.key)
            sample.transfer = self._ask(sample)
        transfer = sample.transfer
        if transfer.fetch is None or transfer.was_prefetched or transfer.stage is not Stage.ASKED:
            return
        if not transfer.fetch.is_answered:  # a late answer is welcome: the sample waits anyway
            return
        transfer.was_prefetched = True
        self.streamer.finder.prefetch(transfer.fetch, sample.keys(self.streamer), sample.tokens, sample.key.taps)

    def _ask(self, sample: Sample) -> Transfer:
        match, tokens = sample.match, sample.tokens
        assert match is not None
        limit = len(tokens) // TOKEN_BYTES - 1
        keys, taps = sample.keys(self.streamer), sample.key.taps
        start, matched = match.num_tokens, match.matched_tokens
        sample.request.log.note("asks the store", start=start)
        return Transfer(self.streamer.find(keys, tokens, start, limit, matched=matched, taps=taps))

    def started(self, sample: Sample, *, is_alone: bool) -> None:
        """Called when a sample gets a lease: start an asynchronous load, or note how far its first step loads."""
        transfer, lease = sample.transfer, sample.lease
        assert lease is not None
        if transfer is None or transfer.stage is not Stage.ASKED:
            return
        assert transfer.fetch is not None
        self.streamer.stats.failed_lookups += transfer.fetch.has_failed
        if transfer.fetch.position <= lease.computed:
            sample.request.log.store_ended("lookup failed" if transfer.fetch.has_failed else "nothing more")
            transfer.end()
            return
        self.streamer.stats.found += 1
        transfer.found(transfer.fetch.position)
        if not self._is_layerwise(lease, transfer.position, is_alone):
            self._load_alone(sample, lease, transfer)

    def _is_layerwise(self, lease: Lease, end: int, is_alone: bool) -> bool:
        """Whether to load layerwise. Other requests may have to wait for the load, though not for long."""
        if self.mode != "auto":
            return self.mode == "layerwise"
        seconds = self.streamer.mover.predicted_seconds(lease.computed, end, lease.named_tables)
        if seconds is None:
            return is_alone
        return seconds < (_LONG_WAIT_S if is_alone else _SHORT_WAIT_S)

    def _load_alone(self, sample: Sample, lease: Lease, transfer: Transfer) -> None:
        count = transfer.position - lease.computed
        tables = self._cache.extend(lease, count, num_loaded=count)
        if isinstance(tables, NoRoom):
            sample.request.log.store_ended("no room", transfer.position)
            transfer.end()
            return
        load = self._load(sample, lease, tables)
        transfer.begin(Stage.LOADING, lease, load)
        self._loading.append(sample)

    def _load(self, sample: Sample, lease: Lease, tables: StepTables) -> Load:
        request = load_request(tables)
        ends = self.streamer.catalogue.load_ends(request.start, request.end, request.blocks)
        return self.streamer.mover.load(request, sample.keys(self.streamer).at(ends, lease.tokens))

    def extend(self, sample: Sample, num_tokens: int) -> StepTables | None:
        """Tables for a step that first loads, then computes up to `num_tokens` tokens.

        None if there is no room for both. The sample then loads asynchronously, or not at all if that does not fit.
        """
        lease, transfer = sample.lease, sample.transfer
        assert lease is not None
        assert transfer is not None
        if transfer.was_late:
            self._load_alone(sample, lease, transfer)
            return None
        num_loaded = transfer.position - lease.computed
        count = num_loaded + min(num_tokens, lease.num_tokens - transfer.position)
        tables = self._cache.extend(lease, count, num_loaded=num_loaded)
        if isinstance(tables, NoRoom):
            self._load_alone(sample, lease, transfer)
            return None
        load = self._load(sample, lease, tables)
        transfer.begin(Stage.IN_STEP, lease, load)
        self._open_step().loads[sample] = load
        return tables

    # --- loads that are steps of their own ----------------------------------------------------------------------------

    def collect(self) -> None:
        """Commit the asynchronous loads that have finished, failed or timed out."""
        for sample in list(self._loading):
            load = _load_of(sample)
            load.expire()
            if load.is_over:
                self._end_load(sample)

    def abandon(self, sample: Sample) -> None:
        """End the load of a sample that finished while its lease was in flight, so that its pages become free."""
        if sample in self._loading:
            _load_of(sample).give_up("aborted", RequestError("the request was aborted"))
            self._end_load(sample)

    def _end_load(self, sample: Sample) -> None:
        self._loading.remove(sample)
        self.streamer.ended(_load_of(sample), "async")
        sample.request.log.loaded(_load_of(sample), "async")
        self._commit(sample)
        assert sample.transfer is not None
        sample.transfer.end()

    def _commit(self, sample: Sample) -> None:
        """Commit the blocks that were loaded completely."""
        transfer = sample.transfer
        assert transfer is not None
        assert transfer.lease is not None
        position = self._cache.commit(transfer.lease, _load_of(sample).num_good)
        if sample.lease is transfer.lease:
            sample.loaded(position)

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: Sequence[tuple[Sample, StepTables]]) -> None:
        """Prepare a step that is about to run: collect the dumps of its layers.

        A second call with the same step changes nothing. A call with another step, when the first never ran, discards
        the dumps of the first and counts them.
        """
        step = self._open_step()
        if scheduled == self._begun:
            return
        step.publish()
        self._begun = scheduled
        for sample, tables in scheduled:
            for one in self._dump_step(sample, tables):
                step.add(sample, one)

    def _dump_step(self, sample: Sample, tables: StepTables) -> list[Outgoing]:
        lease = sample.lease
        assert lease is not None
        points = self._rule.of_step(step_progress(sample, lease, tables))
        if not points:
            return []
        return self.streamer.mover.dump(step_request(tables), points, self._keys_at(points, sample, lease))

    def dump_reply(self, sample: Sample) -> None:
        """Store the end of a normally finished sample, to the token, so that the next turn can resume there."""
        lease = sample.lease
        if lease is None or lease.in_flight or lease.leaf.dead:
            return
        points = self._rule.of_reply(lease.computed)
        if points:
            request = reply_request(lease, self._cache.layout.state_groups)
            self.streamer.mover.dump_now(request, points, self._keys_at(points, sample, lease))

    def _keys_at(self, points: Sequence[DumpPoint], sample: Sample, lease: Lease) -> dict[int, bytes]:
        return sample.keys(self.streamer).at([point.end for point in points], lease.tokens)

    def dumps_after(self, sample: Sample, tables: StepTables) -> bool:
        """Whether the decoding step after the one with these tables dumps."""
        lease = sample.lease
        assert lease is not None
        return bool(self._rule.of_step(step_progress(sample, lease, tables.following())))

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and not ended. Decoding steps that follow one another begin none."""
        return self._step is not None

    def wants_step(self) -> bool:
        """Whether the step loads or dumps."""
        return self._step is not None and self._step.has_transfers

    def before_layer(self, layer: int, frame: Frame) -> None:
        if self._step is not None:
            self._step.before_layer(layer)

    def after_layer(self, layer: int, frame: Frame, hidden: torch.Tensor) -> None:
        if self._step is not None:
            self._step.after_layer(layer)

    def ran(self, *, failed: bool = False) -> None:
        """Called when all layers have run, or when the step has failed, then or later.

        A failed step gives up its loads: its pages become free. Otherwise a second call does nothing.
        """
        step = self._step
        if step is None:
            return
        if not step.has_run:
            if not failed:
                step.after_last_layer()
                step.finish()
            self.streamer.stats.wait_seconds += step.wait_seconds
            self.streamer.mover.settle()
        if failed:
            step.give_up()

    def lacks_rows(self, sample: Sample) -> bool:
        """Whether the step's result for a sample is invalid because its layerwise load failed or is late."""
        if self._step is None or sample not in self._step.loads:
            return False
        return sample in self._step.late or _load_of(sample).failure is not None

    def discard(self, sample: Sample) -> None:
        """Discard the step of a sample that lacks rows.

        After a failed load the sample is rolled back, and keeps tokens that were loaded completely. A late load becomes
        asynchronous: the lease stays in flight until `collect` commits the load. If it ends inside a block, it begins
        again: the step has written to the same page.
        """
        assert self._step is not None
        if sample not in self._step.late:
            self._commit(sample)
            return
        assert sample.transfer is not None
        load = self._step.loads.pop(sample)
        self.streamer.stats.late_loads += 1
        if load.end % self._cache.block_tokens == 0:
            sample.transfer.is_late()
            self._loading.append(sample)
            return
        load.give_up("aborted", RequestError("the load was late"))
        self._commit(sample)
        sample.transfer.begins_again()

    def judge(self, sample: Sample, counts: bool) -> None:
        """Decide whether `end_step` publishes the dumps of a sample's step."""
        assert self._step is not None
        if self._is_in_step(sample):
            sample.loaded(_load_of(sample).end)
            sample.request.log.loaded(_load_of(sample), "layerwise", tuple(self._step.layers))
        self._step.judge(sample, counts)

    def end_step(self) -> None:
        """Called when the step is committed for all its samples. A sample that was not judged counts as failed."""
        step, self._step, self._begun = self._step, None, None
        if step is None:
            return
        for sample, load in step.loads.items():
            assert isinstance(sample, Sample)
            assert sample.transfer is not None
            self.streamer.ended(load, "layerwise")
            if load.failure is not None:
                sample.request.log.loaded(load, "layerwise", tuple(step.layers))
            sample.transfer.end()
        step.publish()

    def _open_step(self) -> StepTransfers:
        if self._step is None:
            self._step = self.streamer.mover.step(self.others_wait)
        return self._step

    def _is_in_step(self, sample: Sample) -> bool:
        return self._step is not None and sample in self._step.loads


def _is_outdated(sample: Sample, transfer: Transfer) -> bool:
    """Whether memory has lost, while a prefetched sample waited, what it had when the store was asked."""
    if not transfer.was_prefetched or transfer.stage is not Stage.ASKED or sample.match is None:
        return False
    return transfer.fetch is not None and sample.match.num_tokens < transfer.fetch.start


def _load_of(sample: Sample) -> Load:
    assert sample.transfer is not None
    assert sample.transfer.load is not None
    return sample.transfer.load
