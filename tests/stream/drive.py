"""An engine on a store whose every logit is compared with the stock model's, unless its load has failed."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridkv.cache.retention.policy import PromptEndBranchesGrid
from hybridkv.engine.loading.identity import model_identity
from hybridkv.engine.request import Sample
from hybridkv.engine.results import Result, Update
from hybridkv.engine.streaming.store_traffic import Streaming
from hybridkv.store import MemoryStore, Store
from hybridkv.store.blob_store import BlobStore
from hybridkv.stream import Catalogue, Streamer
from hybridkv.stream.torch_io import page_bytes
from tests.engine.drive import GREEDY, Driver
from tests.engine.zoo import FAMILIES, build, family_config, make, prompt
from tests.stream.faults import SIZE

STRETCH_TOKENS = 32
LAYERS = {"llama": 3, "falcon_h1": 3}
"""Of models that have too few for a first, a middle and a last row."""


@functools.cache
def model_of(family: str) -> Any:
    """One a process."""
    if family not in LAYERS:
        return build(family)
    return make(family_config(family, num_hidden_layers=LAYERS[family]), 0, FAMILIES[family].branch_scale)


@functools.cache
def identity_of(model: Any) -> str:
    return model_identity(model)


class StreamDriver(Driver):
    """Streams in the mode it is told, in rows of one layer and objects of 32 tokens."""

    def __init__(
        self,
        model: Any,
        store: Store,
        mode: str = "async",
        *,
        identity: str | None = None,
        streamer_options: dict[str, Any] | None = None,
        fill_tokens: int | None = None,
        **options: Any,
    ) -> None:
        """`fill_tokens`: checkpoints as far apart in idle memory and in idle room of the store; by default as usual."""
        super().__init__(model, **{"row_layers": 1, "max_num_batched_tokens": 256, **options})
        if fill_tokens is not None:
            self.cache._checkpoints = PromptEndBranchesGrid(256, fill_tokens=fill_tokens)
        self.store = store
        given = {"stretch_tokens": STRETCH_TOKENS, "load_timeout_s": 20.0, **(streamer_options or {})}
        catalogue = Catalogue(
            self.memory.plan, self.layout, identity or identity_of(model), stretch_tokens=given.pop("stretch_tokens")
        )
        self.streamer = Streamer(store, catalogue, page_bytes(self.memory.buffer), **given)
        self.event = threading.Event()
        self.streamer.on_event = self.event.set
        self.streaming = WatchedStreaming(self.streamer, self.cache, mode)
        self.core.streaming = self.core.scheduler.streaming = self.streaming
        self.streaming.others_wait = self.core.others_wait
        self.runner.observe(self.streaming, self.streaming.wants_step)

    @property
    def stats(self) -> Any:
        return self.streamer.stats

    def step(self) -> list[Update]:
        self.streaming.discarded.clear()
        self.event.clear()
        updates = super().step()
        if self.core.waits:
            self.event.wait(0.002)
        return updates

    def run(self, limit: int = 2000) -> dict[str, Result]:
        """Until everything has ended. Waiting for a store does not count as a step."""
        deadline = time.monotonic() + 60
        while self.core.has_work and limit > 0:
            assert time.monotonic() < deadline, "still at work after a minute"
            limit -= not self.core.waits
            self.step()
        assert not self.core.has_work, "still at work"
        return self.results

    def until_loading(self) -> None:
        """Step until a load is under way beside the steps."""
        deadline = time.monotonic() + 20
        while not self.streaming.num_loading:
            assert time.monotonic() < deadline, "nothing was loaded"
            self.step()

    def until_answered(self) -> None:
        """One step, in which requests ask the store, and its answers: steps after it do not race with lookups."""
        self.step()
        for fetch in self.streamer.finder._asked:
            fetch.wait(20)
            assert fetch.is_answered, "the store was asked and did not answer"

    def close(self, *, clean: bool = True) -> None:
        """Everything has come back: no load, no page, no byte that waits."""
        if clean:
            self.settle()
            assert self.pages_left() == 0
            self.cache.check_integrity()
            assert self.stats.dump_bytes_waiting == 0
        self.runner.close()
        self.streamer.close()

    def pages_left(self) -> int:
        """That somebody holds, when nothing is cached any more."""
        self.cache.reset()
        return sum(self.cache.pages_in_use().values())

    def settle(self) -> None:
        """Take in what has come meanwhile, and have everything written."""
        deadline = time.monotonic() + 20
        while self.streaming._loading or any(load.is_reading for load in self.streamer.mover._loads):
            assert time.monotonic() < deadline, "a load does not end"
            self.step()
            self.event.wait(0.002)
        self.drain()

    def drain(self) -> None:
        """Wait for all dumps, but not for ever."""
        writing = self.streamer.mover._dumper._writing
        with self.streamer.mover._dumper._changed:
            assert self.streamer.mover._dumper._changed.wait_for(lambda: not writing, 20), f"never written: {writing}"

    def _check(self, scheduled: Sequence[Any]) -> None:
        """Rows of requests whose load has failed may be anything; they must not count."""
        row = 0
        whole = getattr(self.runner, "logits", None)  # none if the step failed
        for packed, tables, adapter in scheduled:
            count = tables.end - tables.start
            if (packed, tables.start) not in self.streaming.discarded:
                assert whole is not None
                self.runner.logits = whole[row : row + count]
                super()._check([(packed, tables, adapter)])
            row += count


class WatchedStreaming(Streaming):
    """Knows which rows of a step do not count."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.discarded: set[tuple[bytes, int]] = set()

    def discard(self, sample: Sample) -> None:
        assert sample.transfer is not None
        assert sample.transfer.load is not None
        self.discarded.add((sample.tokens, sample.transfer.load.end))
        super().discard(sample)


def plain_store() -> MemoryStore:
    return MemoryStore(SIZE)


@functools.cache
def filled(family: str, *names: str) -> BlobStore:
    """A store with all that an engine without faults leaves of some prompts; copy it."""
    store = plain_store()
    driver = StreamDriver(model_of(family), store)
    for name in names:
        length, seed = map(int, name.split("/"))
        driver.add(name, prompt(length, seed), replace(GREEDY, max_tokens=2))
    driver.run()
    driver.drain()
    driver.runner.close()
    return store
