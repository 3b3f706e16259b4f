"""Prompts that come from other engines: pages for them, and what becomes of requests whose prompt does not come.

Receiving is a step of its own, which the producer carries out instead of the model: the pages are in flight until it is
over. If it fails, the request computes its prompt. If the producer may still write to the pages then, they are
quarantined: the aborted lease holds them until the arrival is settled, and the request starts with another lease.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridkv.cache import NULL_PAGE, Cache, Lease, NoRoom, StepTables
from hybridkv.engine.linking.handover import prompt_of
from hybridkv.engine.request import Sample
from hybridkv.engine.results import Received
from hybridkv.link.arrival import Arrival, Stage, Wanted
from hybridkv.link.consumer import Consumer
from hybridkv.link.params import RemotePrefill
from hybridkv.link.runs import PageTables


class Receipts:
    """Called on the engine thread."""

    def __init__(self, consumer: Consumer, cache: Cache, settle: Callable[[], None]) -> None:
        """`settle`: waits until pages were copied and zeroed."""
        self._consumer = consumer
        self._cache = cache
        self._settle = settle
        self._is_plain = not cache.layout.needs_checkpoints
        self._quarantine: list[tuple[Arrival, Lease]] = []

    @property
    def num_quarantined(self) -> int:
        """Leases whose pages a producer may still write to."""
        return len(self._quarantine)

    def expect(self, remote: RemotePrefill) -> Arrival:
        return self._consumer.expect(remote.url, remote.request_id, is_early=remote.is_early)

    def claim(self, sample: Sample) -> NoRoom | None:
        """Allocate pages for the whole prompt of a sample that has a lease, and ask for it."""
        lease, arrival = sample.lease, sample.request.arrival
        assert lease is not None
        assert arrival is not None
        count = sample.request.prompt_tokens - lease.computed
        tables = self._cache.extend(lease, count, num_loaded=count)
        if isinstance(tables, NoRoom):
            return tables
        prompt = prompt_of(sample.request)
        wanted = Wanted(
            lease.computed, prompt.num_tokens, _pages_of(tables), prompt.digest, prompt.sampling, self._is_plain
        )
        self._settle()
        self._consumer.claim(arrival, wanted)
        return None

    def commit(self, sample: Sample, arrival: Arrival) -> bool:
        """Take in an arrival that is over. False: its pages are quarantined, and the sample needs another lease."""
        lease = sample.lease
        assert lease is not None
        if not lease.in_flight:  # it failed before it was claimed
            return True
        if not arrival.is_settled:
            self._cache.abort(lease)
            self._quarantine.append((arrival, lease))
            return False
        sample.loaded(self._cache.commit(lease, arrival.num_good, failed=not arrival.num_good))
        if arrival.stage is Stage.DONE:
            sample.request.received = Received(
                arrival.end - arrival.start,
                arrival.num_bytes,
                arrival.num_descriptors,
                arrival.full_attention_bytes,
                arrival.seconds,
            )
        return True

    def abandon(self, arrival: Arrival, lease: Lease | None) -> None:
        """The request has ended. `lease`: its aborted lease, if pages are in flight."""
        if not arrival.is_over:
            self._consumer.give_up(arrival, "the request was aborted")
        if lease is not None:
            self._quarantine.append((arrival, lease))
            self.settle()

    def give_up(self, arrival: Arrival, reason: str) -> None:
        self._consumer.give_up(arrival, reason)

    def settle(self) -> None:
        """Free the pages of arrivals that are settled by now."""
        left = []
        for arrival, lease in self._quarantine:
            if arrival.is_settled:
                self._cache.commit(lease, failed=True)
            else:
                left.append((arrival, lease))
        self._quarantine = left


def _pages_of(tables: StepTables) -> PageTables:
    """The pages that the producer fills: not those that the cache has or copies itself."""
    loaded = tables.loaded
    assert loaded is not None
    first = loaded.start // tables.block_tokens
    wanted = {}
    for name, pages in tables.tables.items():
        copied = set(loaded.copied.get(name, ()))
        wanted[name] = [
            page if number >= first and number not in copied else NULL_PAGE for number, page in enumerate(pages)
        ]
    return PageTables(wanted, loaded.states)
