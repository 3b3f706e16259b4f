"""Tiers are like the stores of an engine: the same objects, found at the same positions, evicted in the same order."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np
import pytest

from hybridkv.cache import NULL_PAGE, Cache, Role, Segment, StepTables
from hybridkv.errors import InputError
from hybridkv.replay import Setting
from hybridkv.replay.tiers.keys import PositionKeys
from hybridkv.replay.tiers.lookup import Index, Read, Supply
from hybridkv.replay.tiers.objects import Need, Objects
from hybridkv.replay.tiers.shelf import Shelf
from hybridkv.replay.tiers.spec import TierSpec, parse_tier
from hybridkv.replay.tiers.tiers import TierLoad, Tiers
from hybridkv.store import MemoryStore, ObjectName, Store
from hybridkv.store.eviction import Evictable, chosen, ranked, spare_limit, with_slack
from hybridkv.store.objects import layout as object_layout
from hybridkv.stream import BlockKeys, Progress
from hybridkv.stream.lookup import Prompt, last_stored
from tests.replay.traces import MODEL, catalogue, layout
from tests.store.samples import name_of

MODELS = ["qwen3.5-0.8b", "gemma-3-1b", "lfm2-1.2b", "mamba2-2.7b", "llama-3.1-8b", "llama-4-scout-17b-16e"]
GIB = 2**30


# --- descriptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("200GiB@2GB/s", TierSpec(200 * GIB, 2e9)),
        ("200G@2GiB/s,1ms", TierSpec(200 * GIB, 2.0 * GIB, 1e-3)),
        (" 1.5TB @ 500M/s , 250us ", TierSpec(1_500_000_000_000, 500.0 * 2**20, 250e-6)),
        ("0@1GB/S,.5s", TierSpec(0, 1e9, 0.5)),
    ],
)
def test_tiers_as_people_write_them(text: str, tier: TierSpec) -> None:
    found = parse_tier(text)
    assert (found.size_bytes, found.bytes_per_s) == (tier.size_bytes, tier.bytes_per_s)
    assert found.latency_s == pytest.approx(tier.latency_s)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("200GiB", "tier '200GiB' has no bandwidth: write it as SIZE@BANDWIDTH"),
        ("200GiB@", "no bandwidth"),
        ("200GiB@2GB", "'2GB' is not a bandwidth in bytes a second"),
        ("200GiB@2GB/h", "'2GB/h' is not a bandwidth"),
        ("200GiB@fast/s", "'fast' is not a size"),
        ("lots@2GB/s", "'lots' is not a size"),
        ("200GiB@0/s", "a bandwidth of 0"),
        ("200GiB@2GB/s,soon", "'soon' is not a latency such as 1ms"),
        ("200GiB@2GB/s,", "'' is not a latency"),
        ("", "no bandwidth"),
    ],
)
def test_other_tiers_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_tier(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("values", [(-1, 1.0, 0.0), (1, 0.0, 0.0), (1, float("nan"), 0.0), (1, 1.0, -1.0)])
def test_impossible_tiers_are_refused(values: tuple[int, float, float]) -> None:
    with pytest.raises(InputError, match="give it"):
        TierSpec(*values)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_ranks_share_a_store() -> None:
    """Heads and states are stored in slices, one a rank. All ranks hold the same latents: stored once, read by each."""
    one, two = Objects(catalogue(2048), 1), Objects(catalogue(2048, MODEL, 2), 2)
    for group in range(len(one.groups)):
        assert two.stored_bytes(group, 256) == pytest.approx(one.stored_bytes(group, 256), rel=0.01)
        assert two.read_bytes(group, 256) == two.stored_bytes(group, 256)
    one, two = (Objects(catalogue(30_000, "deepseek-v3", tp), tp) for tp in (1, 2))
    assert two.stored_bytes(0, 256) == one.stored_bytes(0, 256)
    assert two.read_bytes(0, 256) == 2 * two.stored_bytes(0, 256)


def test_kv_that_memory_has_is_not_needed() -> None:
    objects = Objects(catalogue(2048), 1)
    assert [group.is_state for group in objects.groups] == [False, True]
    full, state = 0, 1
    assert list(objects.needs(0, 0, 600)) == [
        Need(full, 256, 256),
        Need(full, 512, 256),
        Need(full, 600, 88),
        Need(state, 600, 0),
    ]
    assert list(objects.needs(0, 512, 600)) == [Need(full, 600, 88), Need(state, 600, 0)]
    assert list(objects.needs(0, 640, 608)) == [Need(state, 608, 0)]
    assert list(objects.needs(320, 400, 600)) == [Need(full, 512, 112), Need(full, 600, 88), Need(state, 600, 0)]


def test_tokens_are_counted_for_the_tier_that_has_their_kv() -> None:
    reads = [Read(Need(0, 256, 156), b"", 1), Read(Need(0, 512, 256), b"", 0), Read(Need(1, 512, 0), b"", 1)]
    assert Supply(100, 512, reads).tokens_by_level() == {1: 156, 0: 256}
    assert Supply(100, 512, reads[1:]).tokens_by_level() == {0: 256, 1: 156}, "KV of the memory, with a state of tier 1"
    assert Supply(100, 512, reads[2:]).tokens_by_level() == {1: 412}


# --- dumps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_state", [True, False])
def test_where_a_state_is_missing_only_full_stretches_are_stored(has_state: bool) -> None:
    """A step of 300 tokens of a prompt of 301: a stretch ends at 256, and a request may resume at 288."""
    setting = Setting("t", MODEL, 1, 2**31, 16, serial=True, tiers=(TierSpec(2**40, 1e9),))
    tiers, objects = Tiers(catalogue(2048), layout(2048), setting, None), Objects(catalogue(2048), 1)
    segments = [Segment(0, 288 if has_state else 292, (0,), (1,)), Segment(292, 300, (1,), (2,))]
    tables = StepTables(0, 300, 16, {"full": array("i", range(1, 20))}, {"state": segments})
    keys = tiers.keys(bytes(4 * 300))
    tiers.dump_step(keys, tables, Progress(0, 300, 301), 0.0)
    expected = objects.stored_bytes(0, 256) + has_state * (objects.stored_bytes(0, 288) + objects.stored_bytes(1, 288))
    assert tiers.tier_reports()[0].written_bytes == expected
    assert objects.catalogue.num_tokens(objects.groups[0], 288) == 32
    tiers.dump_step(keys, tables, Progress(0, 300, 301), 0.0)
    assert tiers.tier_reports()[0].written_bytes == expected, "what is there is not written again"


def test_what_was_loaded_stays_longer_than_what_was_not() -> None:
    """There is room for two prompts. The first was loaded again, so the second goes for the third."""
    objects = Objects(catalogue(2048), 1)
    size = objects.stored_bytes(0, 256) + objects.stored_bytes(0, 288) + objects.stored_bytes(1, 288)
    setting = Setting("t", MODEL, 1, 2**31, 16, serial=True, tiers=(TierSpec(2 * size + size // 2, 1e9),))
    tiers = Tiers(catalogue(2048), layout(2048), setting, None)
    segments = [Segment(0, 288, (0,), (1,)), Segment(288, 300, (1,), (2,))]
    tables = StepTables(0, 300, 16, {"full": array("i", range(1, 20))}, {"state": segments})
    prompts = [np.full(301, token, "<i4").tobytes() for token in range(3)]

    def load(prompt: bytes, now: float) -> TierLoad | None:
        return tiers.find(tiers.keys(prompt), Cache(layout(2048)).begin(prompt), now)

    for now, prompt in enumerate(prompts[:2]):
        tiers.dump_step(tiers.keys(prompt), tables, Progress(0, 300, 301), now)
    found = load(prompts[0], 100.0)
    assert found is not None
    assert (found.supply.end, found.read_bytes) == (288, [size])
    tiers.end(found, 100.0)
    tiers.dump_step(tiers.keys(prompts[2]), tables, Progress(0, 300, 301), 101.0)
    assert [load(prompt, 102.0) is not None for prompt in prompts] == [True, False, True]


def test_a_window_whose_pages_are_gone_is_not_stored() -> None:
    model = "gemma-3-1b"
    setting = Setting("t", model, 1, 2**31, 16, serial=True, tiers=(TierSpec(2**40, 1e9),))
    objects = Objects(catalogue(2048, model), 1)
    sizes = [objects.stored_bytes(group, 256) for group in range(len(objects.groups))]
    full = next(number for number, group in enumerate(objects.groups) if group.role is Role.FULL)
    for gone, expected in ((0, sum(sizes)), (4, sizes[full])):
        tiers = Tiers(catalogue(2048, model), layout(2048, model), setting, None)
        tables = {group.name: array("i", range(1, 20)) for group in layout(2048, model).token_groups}
        for group in layout(2048, model).token_groups:
            if group.role is Role.LOCAL:
                tables[group.name][:gone] = array("i", [NULL_PAGE] * gone)
        step = StepTables(0, 260, 16, tables, {})
        tiers.dump_step(tiers.keys(bytes(4 * 260)), step, Progress(0, 260, 400), 0.0)
        assert tiers.tier_reports()[0].written_bytes == expected


# --- lookup -----------------------------------------------------------------------------------------------------------


class Names:
    """A store that has these names and nothing else."""

    def __init__(self) -> None:
        self.names: set[ObjectName] = set()

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        return [name in self.names for name in names]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_positions_are_those_that_an_engine_finds(model: str, seed: int) -> None:
    """Random objects of prompts that share prefixes, in two tiers and in a store with the names of an engine."""
    rng = random.Random(seed)
    stored = catalogue(90_000, model)
    objects, names = Objects(stored, 1), Names()
    shelves = [Shelf(2**60, objects.values) for _ in range(2)]
    index = Index(objects, shelves)
    num_found = 0
    for _ in range(6):
        shared, length = 16 * rng.randrange(60), rng.randrange(1200, 2600)
        tokens = np.array([*range(shared), *(rng.randrange(5) for _ in range(length - shared))], "<i4").tobytes()
        keys, theirs = PositionKeys(tokens, objects.stretch_tokens), BlockKeys(b"root", objects.block_tokens)
        ends = {*range(256, length, 256), *(16 * rng.randrange(1, length // 16) for _ in range(5))}
        ends |= {rng.randrange(length // 2, length) for _ in range(5)}
        for end in sorted(ends):
            for number, group in enumerate(objects.groups):
                if rng.random() < 0.9 and stored.num_tokens(group, end):
                    rng.choice(shelves).add(number, keys.at(end), end, 1, 0.0)
                    names.names.add(stored.name(group, theirs.at([end], tokens)[end]))
                    index.add(keys, end)
        for _ in range(12):
            start = rng.choice([0, 0, rng.randrange(length - 1)])
            matched = rng.randrange(start, length) // 16 * 16
            if stored.is_plain or rng.random() < 0.5:  # with full attention alone, memory supplies all it has
                matched = start
            limit = rng.randrange(start, length)
            prompt = Prompt(partial(theirs.at, tokens=tokens), start, limit, matched)
            found = index.find(keys, start, matched, limit)
            expected = start
            if limit // 16 > start // 16:  # else engines do not ask
                expected = last_stored(cast(Store, names), stored, prompt).position
            assert (start if found is None else found.end) == expected
            num_found += found is not None
    assert num_found > 5


def test_keys_are_equal_exactly_where_prefixes_are() -> None:
    one, other = (np.array([*range(600), last, 7], "<i4").tobytes() for last in (1, 2))
    keys, others = PositionKeys(one, 256), PositionKeys(other, 256)
    assert [keys.at(end) == others.at(end) for end in (1, 256, 300, 512, 600, 601, 602)] == [True] * 5 + [False] * 2
    assert len({keys.at(end) for end in range(1, 603)}) == 602


# --- eviction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_spare", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_full_shelf_evicts_in_the_order_of_a_store(seed: int, has_spare: bool) -> None:
    rng = random.Random(seed)
    values, size = (1e-4, 3e-6, 2e-5), 100_000
    shelf, model, now = Shelf(size, values), dict[tuple[int, bytes], Evictable](), 0.0
    evicted = 0
    for number in range(600):
        now += rng.random() * rng.choice([0.1, 5, 300])
        group, key, nbytes = rng.randrange(3), number.to_bytes(32, "big"), rng.randrange(1, 4000)
        if model and rng.random() < 0.3:
            used = rng.choice(list(model))
            shelf.touch(*used, now)
            model[used] = model[used]._replace(used_at=now, is_spare=False)
        is_spare, spare = has_spare and rng.random() < 0.5, [one for one in model.values() if one.is_spare]
        spare_bytes = sum(one.nbytes for one in spare)
        excess = sum(one.nbytes for one in model.values()) + nbytes - (spare_limit(size) if is_spare else size)
        needed = with_slack(excess, size, is_told=False, spare_bytes=spare_bytes)
        is_kept = not is_spare or excess <= spare_bytes
        going = chosen(ranked(spare if is_spare else list(model.values()), now), needed) if is_kept else []
        for one in going:
            del model[int(one.name.group), bytes.fromhex(one.name.key)]
        evicted += sum(not one.is_spare for one in going)
        name = ObjectName("0" * 32, str(group), key.hex())
        new = Evictable(name, nbytes, now, values[group], rng.randrange(10_000), is_spare)
        if is_kept:
            model[group, key] = new
        shelf.add(group, key, new.position, nbytes, now, is_spare=is_spare)
        assert shelf.used_bytes == sum(one.nbytes for one in model.values())
        assert shelf.spare_bytes == sum(one.nbytes for one in model.values() if one.is_spare)
        assert shelf.evicted == evicted
    assert all(shelf.has(*one) for one in model)
    assert evicted > 200


@pytest.mark.parametrize("seed", range(4))
def test_a_shelf_keeps_what_a_store_in_memory_keeps(seed: int) -> None:
    source, now, size = random.Random(seed), 0.0, 40 * 8192 + 100
    shelf, store = Shelf(size, [1.0]), MemoryStore(size, lambda: now)
    for _ in range(500):
        now += source.choice([0.1, 1, 10, 1000])
        number, nbytes, is_spare = source.randrange(80), source.choice([100, 4096, 30_000]), source.random() < 0.55
        name, key = name_of(number), b"%d" % number
        if source.random() < 0.15:
            store.touch([name])
            shelf.touch(0, key, now)
        else:
            create = store.create_spare if is_spare else store.create
            writer = create(name, [nbytes], value=1.0, position=number)
            if writer is not None:
                writer.write(0, [memoryview(bytes(nbytes))])
                assert writer.commit()
            shelf.add(0, key, number, object_layout(name.group, [nbytes]).nbytes, now, is_spare=is_spare)
        stats = store.stats
        assert (shelf.used_bytes, shelf.spare_bytes, shelf.evicted) == (stats.nbytes, stats.spare_bytes, stats.evicted)
        assert shelf.idle_bytes == store.idle_bytes
    assert store.lookup([name_of(number) for number in range(80)]) == [shelf.has(0, b"%d" % n) for n in range(80)]
    assert shelf.evicted > 10


def test_an_object_that_is_larger_than_its_tier_evicts_nothing() -> None:
    shelf = Shelf(100, [1.0])
    shelf.add(0, b"a", 16, 60, 0.0)
    shelf.add(0, b"b", 16, 101, 1.0)
    shelf.add(0, b"b", 16, 101, 1.0, is_spare=True)  # is not counted
    assert (shelf.has(0, b"a"), shelf.has(0, b"b"), shelf.dropped, shelf.evicted) == (True, False, 1, 0)
    shelf.add(0, b"a", 16, 60, 2.0)
    assert (shelf.used_bytes, shelf.written_bytes) == (60, 60)
    shelf.add(0, b"c", 16, 41, 3.0)
    assert (shelf.has(0, b"a"), shelf.has(0, b"c"), shelf.evicted, shelf.peak_bytes) == (False, True, 1, 60)
