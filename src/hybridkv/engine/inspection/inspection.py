"""An engine as people see it, on any thread: snapshots, steps, records, and prefixes pinned or dropped by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hybridkv.cache import Pin
from hybridkv.cache.tokens import TOKEN_BYTES
from hybridkv.engine.core import EngineCore
from hybridkv.engine.inspection.publishing import Snapshot
from hybridkv.engine.inspection.record import RequestRecord
from hybridkv.engine.inspection.views import unpacked
from hybridkv.engine.loop import EngineLoop
from hybridkv.errors import RequestError

_MOST_PINNED = 0.5
"""Share of the slabs that pins may keep in place."""


class PrefixTokens(NamedTuple):
    """A run of cached tokens, and the tokens before it."""

    start: int
    """Where the run begins."""
    token_ids: list[int]
    """From the first token of the prompt to the end of the run."""


class Inspection:
    """One engine."""

    def __init__(self, core: EngineCore, loop: EngineLoop) -> None:
        self._core = core
        self._loop = loop
        self._publishing = core.publishing
        self._pins: dict[bytes, list[Pin]] = {}
        """Pins by the key of the run's first block, one for each checkpoint. Only the engine's thread uses it."""

    # --- snapshots, steps and records ---------------------------------------------------------------------------------

    def watch(self, topics: Iterable[str]) -> None:
        """Have snapshots of these topics ("memory", "prefixes") built for the next five seconds."""
        self._publishing.watch(topics)
        self._loop.post(self._publishing.refresh)

    def latest(self, topic: str) -> Snapshot | None:
        """The last snapshot of a topic. It stays the last one while nothing changes."""
        return self._publishing.latest(topic)

    def steps_since(self, n: int) -> list[dict[str, Any]]:
        """The steps after number `n`, as far as they are kept."""
        return self._publishing.steps.since(n)

    def on_record(self, call: Callable[[RequestRecord], None] | None) -> None:
        """Call `call` with the record of every request that ends, on the engine's thread: it must return at once."""
        self._core.on_record = call

    # --- prefixes by hand ---------------------------------------------------------------------------------------------

    def prefix_tokens(self, key: bytes) -> PrefixTokens | None:
        """A run by the key of its first block. None: it is not cached any more."""
        found = self._loop.call(lambda: self._core.cache.inspector.prefix(key))
        return None if found is None else PrefixTokens(found[0], unpacked(found[1]))

    def pin_prefix(self, key: bytes, seconds: float) -> int:
        """Keep a run, its last checkpoints and all before it for `seconds`. Returns the number of tokens that are kept.

        0: it is not cached, or nothing of it can be resumed from.
        """
        return self._loop.call(lambda: self._pin(key, seconds))

    def unpin_prefix(self, key: bytes) -> bool:
        """End a pin. Returns whether there was one."""
        return self._loop.call(lambda: self._unpin(key))

    def drop_prefix(self, key: bytes) -> int:
        """Remove a run and all that continues it from the cache. Returns the number of tokens; 0: it is not cached."""
        return self._loop.call(lambda: self._drop(key))

    def _pin(self, key: bytes, seconds: float) -> int:
        cache = self._core.cache
        found = cache.inspector.resumable(key)
        if found is None:
            return 0
        lookup_key, prefixes = found
        pins = [cache.pin(tokens, seconds, lookup_key) for tokens in prefixes]
        if cache.pinned_slabs() > _MOST_PINNED * cache.layout.num_slabs:
            for pin in pins:
                cache.unpin(pin)
            count = len(prefixes[-1]) // TOKEN_BYTES
            raise RequestError(f"a pin of {count} tokens: pins would keep more than half of the memory; unpin others")
        self._unpin(key)
        self._pins = {name: old for name, old in self._pins.items() if any(pin.ended is None for pin in old)}
        self._pins[key] = pins
        num_tokens = max(pin.num_tokens for pin in pins)
        if not num_tokens:
            self._unpin(key)
        return num_tokens

    def _unpin(self, key: bytes) -> bool:
        pins = [pin for pin in self._pins.pop(key, ()) if pin.ended is None]
        for pin in pins:
            self._core.cache.unpin(pin)
        self._publishing.hasten()
        return bool(pins)

    def _drop(self, key: bytes) -> int:
        cache = self._core.cache
        below = cache.inspector.keys_below(key)
        for pinned in [one for one in self._pins if one in below]:
            self._unpin(pinned)
        self._publishing.hasten()
        return cache.inspector.drop(key)
