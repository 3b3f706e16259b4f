"""What a store can add to a prompt: the largest position for which it has everything, in few questions."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hybridkv.cache import Role
from hybridkv.cache.tokens import lookup_key, pack_tokens
from hybridkv.store import MemoryStore, ObjectName
from hybridkv.stream import BlockKeys
from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.form import Share
from hybridkv.stream.lookup import Prompt, last_stored
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


def keys_of(catalogue: Catalogue) -> dict[int, bytes]:
    """By position."""
    return BlockKeys(lookup_key().root, catalogue.block_tokens).at(range(1, len(TOKENS) + 1), pack_tokens(TOKENS))


def needed(catalogue: Catalogue, keys: dict[int, bytes], start: int, end: int, matched: int = 0) -> set[ObjectName]:
    """By the rule, word by word: every stretch that is seen from `end`, and the states at `end`."""
    names = {catalogue.name(group, keys[end]) for group in catalogue.state_groups}
    stretch_tokens = catalogue.stretch_blocks * SIZE
    for group in catalogue.token_groups:
        first = max(start, min(matched, end // SIZE * SIZE)) if group.role is Role.FULL else start
        for position in range(max(first, group.sight.first_visible(end)), end):
            span_end = min((position // stretch_tokens + 1) * stretch_tokens, end)
            names.add(catalogue.name(group, keys[span_end]))
    return names


def test_hidden_states_that_are_not_stored_are_noticed_in_few_lookups() -> None:
    catalogue = catalogue_of("llama")
    keys = keys_of(catalogue)
    store = Counted()
    store.names = {catalogue.name(group, keys[end]) for group in catalogue.groups for end in range(16, 401, 16)}
    prompt = Prompt(lambda ends: {end: keys[end] for end in ends}, 0, 400, taps=["tap1"])
    assert last_stored(store, catalogue, prompt).position == 0
    assert store.asked <= 3


def last(store: Counted, catalogue: Catalogue, keys: dict[int, bytes], start: int, matched: int = 0) -> int:
    prompt = Prompt(lambda ends: {end: keys[end] for end in ends}, start, len(TOKENS), matched)
    return last_stored(store, catalogue, prompt).position


@pytest.mark.parametrize("family", MIXED)
def test_it_finds_the_largest_position_that_every_group_can_supply(family: str) -> None:
    """Prompts end at blocks, replies at any token."""
    catalogue = catalogue_of(family)
    keys = keys_of(catalogue)
    chance = random.Random(family)
    found_something = found_inside = 0
    for _ in range(300):
        store = Counted()
        density = chance.choice([0.5, 0.9, 0.97])
        ends = [*range(SIZE, 401, SIZE), *chance.sample(range(17, 400), 6)]
        every = {catalogue.name(group, keys[end]) for group in catalogue.groups for end in ends}
        store.names = {name for name in sorted(every) if chance.random() < density}
        start = chance.choice([0, 0, 16, 37, 64, 100, 128])
        matched = chance.choice([0, 0, start, start // SIZE * SIZE + 48])
        best = max(
            (
                e
                for e in ends
                if e // SIZE > start // SIZE and needed(catalogue, keys, start, e, matched) <= store.names
            ),
            default=start,
        )
        assert last(store, catalogue, keys, start, matched) == best
        found_something += best > start
        found_inside += best > start and best % SIZE > 0
    assert found_something > 20
    assert found_inside > 5


@pytest.mark.parametrize("family", MIXED)
def test_it_asks_a_few_times_however_long_the_prompt(family: str) -> None:
    catalogue = catalogue_of(family)
    keys = keys_of(catalogue)
    store = Counted()
    store.names = needed(catalogue, keys, 0, 400)
    assert last(store, catalogue, keys, 0) == 400
    assert store.asked <= 3
    store.asked, store.names = 0, set()
    assert last(store, catalogue, keys, 0) == 0
    assert store.asked <= 2


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
@pytest.mark.parametrize("end", [400, 395])
def test_objects_of_other_tensor_parallel_sizes_count_if_all_slices_are_there(family: str, end: int) -> None:
    catalogue = catalogue_of(family)
    keys = keys_of(catalogue)
    group = max(catalogue.groups, key=lambda one: one.slices)
    store = Counted()
    own = needed(catalogue, keys, 0, end)
    store.names = {name for name in own if name.group != group.name}
    halves = {
        catalogue.name(group, bytes.fromhex(name.key), Share(n, 2)) for name in own - store.names for n in range(2)
    }
    store.names |= halves
    assert last(store, catalogue, keys, 0) == end
    for lost in halves:
        store.names.remove(lost)
        assert last(store, catalogue, keys, 0) < end
        store.names.add(lost)


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "mamba2"])
def test_a_short_reply_of_another_tensor_parallel_size_is_found(family: str) -> None:
    """Its prompt's end, at a block's end, is the first sign of the other engine. No stretch is full."""
    catalogue = catalogue_of(family)
    keys = keys_of(catalogue)
    halves = {group.name: Share(0, 2).of_group(group.name) for group in catalogue.groups if group.slices > 1}
    store = Counted()
    for end in (16, 29):
        for name in needed(catalogue, keys, 0, end):
            runs = [f"{name.group}.{n}of2" for n in range(2)] if name.group in halves else [name.group]
            store.names |= {ObjectName(name.namespace, run, name.key) for run in runs}
    found = last_stored(store, catalogue, Prompt(lambda ends: {end: keys[end] for end in ends}, 0, 31)).position
    assert found == 29
    assert store.asked <= 4


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("num_tokens", [1_000, 8_192, 131_072])
def test_round_trips_grow_with_the_logarithm_of_the_prompt(family: str, num_tokens: int) -> None:
    """At worst: all full-attention KV is there, and every state but the first; then one whole prefix far back."""
    catalogue = catalogue_of(family)
    keys = {end: end.to_bytes(32, "big") for end in range(1, num_tokens + 1)}
    prompt = Prompt(lambda ends: {end: keys[end] for end in ends}, 0, num_tokens)
    store = Counted()
    for end in catalogue.stretch_ends(0, num_tokens):
        store.names |= {catalogue.name(group, keys[end]) for group in catalogue.token_groups if group.role is Role.FULL}
    store.names |= whole_prefix(catalogue, keys, 256)
    assert last_stored(store, catalogue, prompt).position >= 256
    assert store.asked <= 6 + 3 * (num_tokens // 1024).bit_length()
    store.asked = 0
    store.names |= whole_prefix(catalogue, keys, num_tokens)
    assert last_stored(store, catalogue, prompt).position == num_tokens
    assert store.asked <= 3


def whole_prefix(catalogue: Catalogue, keys: dict[int, bytes], end: int) -> set[ObjectName]:
    """All objects that are needed to resume at `end`."""
    return set(catalogue.load_names(0, end, keys))
