"""The stored form: the bytes of objects depend on the model and its tokens alone, and any engine can load them.

Every byte of every object is compared with a naive description (`naive`), read back by an independent reader
(`reader`), and loaded by engines with another tensor-parallel size and another plan.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hybridkv.cache.tokens import lookup_key, pack_tokens
from hybridkv.errors import ParallelismError
from hybridkv.plan.layout import ROW_ORDERS
from hybridkv.spec import DType, LayerSpec, Part
from hybridkv.store import FileStore, MemoryStore, ObjectName, Store, Writer
from hybridkv.store.memory import MemoryBlobs
from hybridkv.stream import BlockKeys, DumpPoint, PageRequest
from tests.stream.naive import SIZES, Axis, Layer, Naive, PartOf, StoredRows, models
from tests.stream.ranks import Content, Rank
from tests.stream.reader import Bytes, UnreadableError, key_of, read, seen_from, spans_of

forms = settings(
    max_examples=int(os.environ.get("HYBRIDKV_FORMS", "8")),
    phases=[Phase.generate],  # shrinking an engine takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Objects = dict[tuple[str, bytes], tuple[int, list[bytes]]]


# --- engines ----------------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """Tokens that an engine computes in `steps`. `ends`: where objects end; True where others may resume."""

    tokens: list[int]
    ends: dict[int, bool]
    steps: list[int]
    taps: list[int]

    @property
    def tap_names(self) -> list[str]:
        return [f"tap{layer}" for layer in self.taps]


@st.composite
def options_of(draw: st.DrawFn, model: Naive) -> dict[str, Any]:
    packable = sum(layer.kind in ("full", "latent") for layer in model.layers)
    return {
        "block_tokens": model.block_tokens,
        "memory_bytes": draw(st.sampled_from([5 << 20, 6 << 20])),
        "attn_pack_size": draw(st.sampled_from([None, *range(1, packable + 1)])),
        "row_layers": draw(st.integers(1, 4)),
        "row_order": draw(st.sampled_from(ROW_ORDERS)),
    }


@st.composite
def prompts(draw: st.DrawFn, model: Naive) -> list[Prompt]:
    """One or two prompts; the second begins like the first."""
    found: list[Prompt] = []
    tapped = [layer.number for layer in model.layers if layer.kind == "tap"]
    for number in range(draw(st.integers(1, 2))):
        length = draw(st.sampled_from([model.block_tokens, 17, 40, 85]))
        alike = draw(st.integers(0, len(found[0].tokens))) if found else 0
        tokens = [*(found[0].tokens[:alike] if found else ()), *range(100 * number, 100 * number + length)][:length]
        ends = dict.fromkeys(range(model.stretch_tokens, length + 1, model.stretch_tokens), False)
        ends |= dict.fromkeys([length, *draw(st.lists(st.integers(1, length), max_size=3))], True)
        steps = sorted({*draw(st.lists(st.integers(1, length), max_size=2)), length})
        taps = draw(st.lists(st.sampled_from(tapped), unique=True)) if tapped else []
        found.append(Prompt(tokens, dict(sorted(ends.items())), steps, taps))
    return found


@contextmanager
def engine(model: Naive, tp: int, store: Store, options: Mapping[str, Any], seed: int) -> Iterator[list[Rank]]:
    """All ranks, in a random order."""
    order = random.Random(seed).sample(range(tp), tp)
    ranks = [
        Rank(model.spec(tp, rank), store, "weights", model.stretch_tokens, seed + rank, **options) for rank in order
    ]
    store.describe(ranks[0].catalogue.namespace, ranks[0].catalogue.description)
    yield ranks
    for rank in ranks:
        rank.close()


def content_of(model: Naive) -> Content:
    """What a rank has of the whole model's bytes."""
    layers = {(type(layer.spec(1, 0)), layer.number): layer for layer in model.layers}

    def content(spec: LayerSpec, part: Part, known: bytes) -> Bytes:
        layer = layers[type(spec), spec.layer]
        whole = next(one for one in layer.parts if one.name == part.name)
        runs = [
            layer.element(whole, axis, known)[run.start : run.start + run.count] for axis, run in enumerate(part.runs)
        ]
        return np.concatenate(runs)

    return content


def write(model: Naive, tp: int, store: Store, options: Mapping[str, Any], seed: int, given: Sequence[Prompt]) -> str:
    """Have an engine compute the prompts and dump them. Returns the namespace."""
    with engine(model, tp, store, options, seed) as ranks:
        for rank in ranks:
            for prompt in given:
                whole = rank.request(
                    len(prompt.tokens), [e for e, resumes in prompt.ends.items() if resumes], prompt.tap_names
                )
                for start, end in zip([0, *prompt.steps], prompt.steps, strict=False):
                    points = [DumpPoint(e, resumes) for e, resumes in prompt.ends.items() if start < e <= end]
                    rank.dump(whole._replace(start=start, end=end), prompt.tokens, points, content_of(model))
            assert rank.stats.dumps_failed == rank.stats.dumps_dropped == 0
        return ranks[0].catalogue.namespace


class NotingStore(MemoryStore):
    """Knows every object that was begun, also if it was there already."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.begun: Counter[tuple[str, bytes]] = Counter()

    def create(self, name: ObjectName, row_bytes: Sequence[int], *, value: float, position: int) -> Writer | None:
        self.begun[name.group, bytes.fromhex(name.key)] += 1
        return super().create(name, row_bytes, value=value, position=position)


def contents(store: Store) -> Objects:
    found: Objects = {}
    for stored in store.objects():
        with store.open(stored.name) as reader:
            rows = [bytearray(row.nbytes) for row in reader.header.rows]
            for number, row in enumerate(rows):
                reader.read(number, [memoryview(row)])
            found[stored.name.group, bytes.fromhex(stored.name.key)] = reader.header.position, [bytes(r) for r in rows]
    return found


def expected_of(model: Naive, given: Sequence[Prompt], tp: int) -> Objects:
    found: Objects = {}
    for prompt in given:
        found |= model.objects(prompt.tokens, prompt.ends, tp, prompt.taps)
    return found


def files_of(store: MemoryStore) -> dict[str, bytes]:
    """The files that a directory would have."""
    assert isinstance(store.blobs, MemoryBlobs)
    files = {f"about/{space}.json": json.dumps(info).encode() for space, info in store.blobs.descriptions().items()}
    for name, entry in store.blobs._entries.items():
        files[f"objects/{name.namespace}/{name.group}/{name.key[:2]}/{name.key}"] = entry.data.tobytes()
    return files


# --- writing ----------------------------------------------------------------------------------------------------------


@forms
@given(st.data())
def test_objects_have_the_same_bytes_whatever_plan_computed_them(data: st.DataObject) -> None:
    """Exactly the objects of the naive description are written. What ranks hold alike is written by one of them."""
    model = data.draw(models())
    given = data.draw(prompts(model))
    namespaces = set()
    for tp in data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2, unique=True)):
        store = NotingStore()
        namespaces.add(write(model, tp, store, data.draw(options_of(model)), data.draw(st.integers(0, 99)), given))
        assert contents(store) == expected_of(model, given, tp)
        assert store.begun == sum((Counter(expected_of(model, [prompt], tp).keys()) for prompt in given), Counter())
    assert len(namespaces) == 1


# --- reading ----------------------------------------------------------------------------------------------------------


def mix(store: MemoryStore, chance: random.Random) -> None:
    """Keep all objects of one way for each group and position, and some of the other ways."""
    by_place: dict[tuple[str, str], dict[int, list[ObjectName]]] = {}
    for stored in store.objects():
        base, _, run = stored.name.group.partition(".")
        ways = int(run.partition("of")[2] or 1)
        by_place.setdefault((base, stored.name.key), {}).setdefault(ways, []).append(stored.name)
    for by_way in by_place.values():
        kept = chance.choice(sorted(by_way))
        store.delete([name for way, names in by_way.items() for name in names if way != kept and chance.random() < 0.7])


def check_read(model: Naive, files: Any, namespace: str, prompt: Prompt, end: int) -> None:
    """The reader returns the naive content, all that is needed at `end` and nothing else."""
    cache = read(files, namespace, [""], prompt.tokens[:end], prompt.taps)
    packed, kv, states = pack_tokens(prompt.tokens), dict(cache.kv), dict(cache.states)
    for group in model.groups:
        for layer, runs in group.rows:
            if layer.kind == "state":
                for (name, found), (part, axis) in zip(states.pop((group.name, layer.number)), runs, strict=True):
                    assert name == part.name
                    assert (found == layer.element(part, axis, packed[: 4 * end])).all()
            elif layer.kind != "tap" or layer.number in prompt.taps:
                spans = spans_of(group.sight, end, model.block_tokens, model.stretch_tokens)
                for part, axis in runs if spans else ():
                    first, found = kv.pop((layer.number, part.name))
                    assert first <= seen_from(group.sight, end)
                    assert first + len(found) == end
                    for token in range(first, end):
                        assert (found[token - first] == layer.element(part, axis, packed[: 4 * token + 4])).all()
    assert not kv
    assert not states


def needed_pages(model: Naive, request: PageRequest, rank: Rank) -> PageRequest:
    """The request without pages of blocks that its end does not see."""
    blocks = dict(request.blocks)
    for name, pages in blocks.items():
        group = next((group for group in rank.plan.groups if group.name == name), None)
        kind = next((one for one in model.layers if group and one.group == group.specs[0].group), None)
        sight = {kind.kind: kind.reach} if kind and kind.reach else {}
        first = seen_from(sight, request.end) // model.block_tokens
        blocks[name] = [0] * first + list(pages[first:])
    return request._replace(blocks=blocks)


def check_load(model: Naive, rank: Rank, prompt: Prompt, end: int) -> None:
    """Every byte that position `end` needs is right, and no other byte of the memory has changed."""
    request = rank.request(end, [end], prompt.tap_names)
    expected = bytearray(rank.memory)
    for layer in range(rank.plan.model.num_layers):
        rank.fill(expected, needed_pages(model, request, rank), pack_tokens(prompt.tokens), content_of(model), layer)
    load = rank.load(request, prompt.tokens, prompt.tap_names)
    assert (load.failure, load.num_good) == (None, end), load.error
    assert rank.memory == expected


def may_find(model: Naive, prompt: Prompt, end: int, num_sizes: int) -> bool:
    """Engines of other sizes find ends inside blocks if those who wrote them also wrote a block's end before."""
    if end % model.block_tokens == 0:
        return True
    before = any(resumes and e % model.block_tokens == 0 for e, resumes in prompt.ends.items() if e <= end)
    return before and num_sizes == 1


@forms
@given(st.data())
def test_any_engine_and_the_reader_load_any_mix_of_ways(data: st.DataObject) -> None:
    model = data.draw(models())
    given = data.draw(prompts(model))
    seed = data.draw(st.integers(0, 99))
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3, unique=True))
    store = MemoryStore(64 << 20)
    for tp in sizes:
        namespace = write(model, tp, store, data.draw(options_of(model)), seed + tp, given)
    mix(store, random.Random(seed))
    files = files_of(store)
    resumable = [(prompt, end) for prompt in given for end, resumes in prompt.ends.items() if resumes]
    for prompt, end in resumable:
        check_read(model, files, namespace, prompt, end)
    with engine(model, data.draw(st.sampled_from(SIZES)), store, data.draw(options_of(model)), seed + 50) as ranks:
        for rank in ranks:
            for prompt, end in data.draw(st.lists(st.sampled_from(resumable), min_size=1, max_size=2)):
                if may_find(model, prompt, end, len(sizes)):
                    assert rank.found(prompt.tokens, end, prompt.tap_names) == end
                check_load(model, rank, prompt, end)


def own_pages(rank: Rank, request: PageRequest) -> Iterator[slice]:
    """Where the request's pages are in memory."""
    for group in rank.plan.groups:
        tables = [
            pages
            for name, pages in request.blocks.items()
            if name == group.name or (group.name == "taps" and name.startswith("tap"))
        ]
        tables += list(request.states.get(group.name, {}).values())
        for page in (page for pages in tables for page in pages):
            start = group.page_offset(page)
            yield slice(start, start + group.page_bytes)


def held(group: StoredRows, tp: int, rank: int) -> range:
    """Slices of a rank."""
    total = group.num_runs(tp)
    each, number = group.slices // total, rank * total // tp
    return range(each * number, each * (number + 1))


def ways(group: StoredRows, namespace: str, key: str, slices: range) -> Iterator[list[ObjectName]]:
    """In each way to divide the group: the objects that have some of these slices."""
    for total in (n for n in range(1, group.slices + 1) if group.slices % n == 0):
        numbers = sorted({s * total // group.slices for s in slices})
        names = [group.name if total == 1 else f"{group.name}.{number}of{total}" for number in numbers]
        yield [ObjectName(namespace, name, key) for name in names]


def has_way(store: Store, group: StoredRows, namespace: str, key: str, slices: range) -> bool:
    return any(all(store.lookup(names)) for names in ways(group, namespace, key, slices))


@forms
@given(st.data())
def test_a_missing_slice_is_a_miss_or_a_failed_load(data: st.DataObject) -> None:
    """The slice belongs to any group, at any position that is needed. No page of another request is touched."""
    model = data.draw(models())
    prompt = data.draw(prompts(model))[0]
    seed, tp = data.draw(st.integers(0, 99)), data.draw(st.sampled_from(SIZES))
    end = max(end for end in range(0, len(prompt.tokens) + 1, model.block_tokens))
    prompt.ends[end] = True
    store = MemoryStore(64 << 20)
    for writer in data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2, unique=True)):
        namespace = write(model, writer, store, data.draw(options_of(model)), seed, [prompt])
    needed = [
        (group, e)
        for group in model.groups
        if group.layer.kind != "tap" or group.layer.number in prompt.taps
        for _, e in (
            [(0, end)]
            if group.layer.kind == "state"
            else spans_of(group.sight, end, model.block_tokens, model.stretch_tokens)
        )
    ]
    if not needed:
        return
    group, at = data.draw(st.sampled_from(needed))
    lost = data.draw(st.integers(0, group.slices - 1))
    key = key_of([""], prompt.tokens, at, model.block_tokens).hex()
    store.delete([name for way in ways(group, namespace, key, range(lost, lost + 1)) for name in way])
    with pytest.raises(UnreadableError, match=f"{group.name} at {at}"):
        read(files_of(store), namespace, [""], prompt.tokens[:end], prompt.taps)
    with engine(model, tp, store, data.draw(options_of(model)), seed) as ranks:
        for rank in ranks:
            assert rank.found(prompt.tokens, end, prompt.tap_names) < end
            request, before = rank.request(end, [end], prompt.tap_names), bytearray(rank.memory)
            load = rank.load(request, prompt.tokens, prompt.tap_names)
            is_lost = not has_way(store, group, namespace, key, held(group, tp, rank.plan.model.rank))
            assert load.failure == ("missing" if is_lost else None)
            assert (load.num_good < end) == is_lost
            for place in own_pages(rank, request):
                before[place] = rank.memory[place]
            assert before == rank.memory


def test_the_reader_reads_a_directory_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    heads = (Axis("even", 8),)
    model = Naive((Layer("full", 0, tuple(PartOf(name, heads, (2,), DType.FLOAT16) for name in "kv")),), 4, 8)
    prompt = Prompt(list(range(90)), {**dict.fromkeys(range(8, 90, 8), False), 90: True}, [90], [])
    with FileStore(tmp_path, 1 << 24) as store:
        namespace = write(model, 2, store, {"block_tokens": 4}, 0, [prompt])
    check_read(model, tmp_path, namespace, prompt, 90)
    about = tmp_path / "hybridkv-v1" / "about" / f"{namespace}.json"
    info = json.loads(about.read_text())
    about.write_text(json.dumps(info | {"layout": info["layout"] + " "}))
    with pytest.raises(UnreadableError, match="its layout has the digest"):
        read(tmp_path, namespace, [""], prompt.tokens)
    changes: list[tuple[tuple[str | int, ...], dict[str, Any], str]] = [
        ((), {"format": 3}, "format 3 is not known"),
        ((), {"rotated": 1}, "field rotated is not known"),
        (("groups", "full"), {"role": "tree"}, "role tree is not known"),
        (("groups", "full"), {"padding": 1}, "field padding is not known"),
        (("groups", "full", "rows", 0), {"scale": 1}, "field scale is not known"),
    ]
    for path_to, change, what in changes:
        layout: Any = json.loads(info["layout"])
        reduce(lambda outer, name: outer[name], path_to, layout).update(change)
        text = json.dumps(layout)
        other = blake2b(text.encode(), digest_size=16).hexdigest()
        with pytest.raises(UnreadableError, match=what):
            read({f"about/{other}.json": json.dumps({"layout": text}).encode()}, other, [""], prompt.tokens)
    about.write_text(json.dumps(info))
    path = next((tmp_path / "hybridkv-v1" / "objects").rglob(key_of([""], prompt.tokens, 90, 4).hex()))
    good = path.read_bytes()
    for place, what in [(0, "magic"), (8, "version"), (30, "header checksum"), (4096, "checksum of row 0")]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(UnreadableError, match=what):
            read(tmp_path, namespace, [""], prompt.tokens)


@pytest.mark.parametrize("salt", [[""], ["tenant"], ["", "adapter"], ["tenant", "ä", ""]])
def test_the_reader_makes_the_same_keys(salt: list[str]) -> None:
    tokens, ends = list(range(150)), range(1, 151)
    keys = BlockKeys(lookup_key(salt[0], salt[1:]).root, 4).at(ends, pack_tokens(tokens))
    assert keys == {end: key_of(salt, tokens, end, 4) for end in ends}


# --- what cannot be shared --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("units", "tp", "slices"), [(6, 3, 2), (6, 6, 2), (24, 3, 8), (24, 6, 8), (3, 3, 1)])
@pytest.mark.parametrize("how", ["even", "replicated"])
@pytest.mark.parametrize("kind", ["full", "state"])
def test_ranks_that_cannot_share_the_slices_are_refused(kind: str, how: str, units: int, tp: int, slices: int) -> None:
    parts = tuple(PartOf(name, (Axis(how, units),), (2,), DType.FLOAT16) for name in "kv")
    model = Naive((Layer(kind, 0, parts),), 4, 8)
    message = f"a store for naive at TP {tp}: its {kind} layers are stored in {slices} slices, which {tp} ranks cannot"
    for rank in range(tp):
        with pytest.raises(ParallelismError, match=message):
            Rank(model.spec(tp, rank), MemoryStore(1 << 20), "weights", 8, 0, block_tokens=4)
