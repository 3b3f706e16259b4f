"""What a store can add to a prompt: the largest position for which it has everything, in few questions."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hybridkv.cache.tokens import lookup_key, pack_tokens
from hybridkv.store import MemoryStore, ObjectName
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.lookup import last_stored
from tests.engine.zoo import prompt
from tests.stream.drive import StreamDriver, model_of, plain_store
from tests.stream.test_faults import MIXED

TOKENS = prompt(400, 1)
SIZE = 16


class Counted(MemoryStore):
    """Counts questions."""

    def __init__(self) -> None:
        super().__init__(1 << 24)
        self.names: set[ObjectName] = set()
        self.asked = 0

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        self.asked += 1
        return [name in self.names for name in names]


def catalogue_of(family: str) -> Catalogue:
    driver = StreamDriver(model_of(family), plain_store())
    driver.close()
    return driver.streamer.catalogue


def keys(num_blocks: int) -> list[bytes]:
    driver = StreamDriver(model_of("llama"), plain_store())
    driver.close()
    return list(driver.streamer.finder.block_keys(lookup_key().root).first(num_blocks, pack_tokens(TOKENS)))


def needed(catalogue: Catalogue, chain: Sequence[bytes], start: int, end: int) -> set[ObjectName]:
    """By the rule, word by word: every stretch that is seen from `end`, and the states at `end`."""
    names = {catalogue.name(group, chain[end // SIZE - 1]) for group in catalogue.state_groups}
    stretch_tokens = catalogue.stretch_blocks * SIZE
    for group in catalogue.token_groups:
        seen = range(max(start, group.cache.sight.first_visible(end)) // SIZE, end // SIZE)
        for block in seen:
            span_end = min((block * SIZE // stretch_tokens + 1) * stretch_tokens, end)
            names.add(catalogue.name(group, chain[span_end // SIZE - 1]))
    return names


@pytest.mark.parametrize("family", MIXED)
def test_it_finds_the_largest_position_that_every_group_can_supply(family: str) -> None:
    catalogue, chain = catalogue_of(family), keys(25)
    chance = random.Random(family)
    ends = range(SIZE, 25 * SIZE + 1, SIZE)
    found_something = 0
    for _ in range(300):
        store = Counted()
        density = chance.choice([0.5, 0.9, 0.97])
        every = {catalogue.name(group, key) for group in catalogue.groups for key in chain}
        store.names = {name for name in sorted(every) if chance.random() < density}
        start = chance.choice([0, 0, 16, 37, 64, 100, 128])
        best = max(
            (e for e in ends if e // SIZE > start // SIZE and needed(catalogue, chain, start, e) <= store.names),
            default=start,
        )
        assert last_stored(store, catalogue, chain, start) == best
        found_something += best > start
    assert found_something > 20


@pytest.mark.parametrize("family", MIXED)
def test_it_asks_a_few_times_however_long_the_prompt(family: str) -> None:
    catalogue, chain = catalogue_of(family), keys(25)
    store = Counted()
    store.names = needed(catalogue, chain, 0, 400)
    assert last_stored(store, catalogue, chain, 0) == 400
    assert store.asked <= 3
    store.asked, store.names = 0, set()
    assert last_stored(store, catalogue, chain, 0) == 0
    assert store.asked <= 2
