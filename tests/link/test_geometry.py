"""A geometry says the same after it was sent, and no value of another process leads outside an arena."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridkv.cache import Role
from hybridkv.link.errors import LinkMismatch
from hybridkv.link.geometry import FORMAT, Geometry
from hybridkv.link.runs import Cutter, PageTables
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.spec import AttentionLayer, LinearState, ModelSpec
from tests.link.sides import geometry_of
from tests.link.test_runs import FAMILIES, plan_of, spec_of
from tests.stream.naive import models

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def sent(geometry: Geometry) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(geometry.to_json()))
    return found


def family(name: str, number: int = 0, tp: int = 1) -> Geometry:
    return geometry_of(spec_of(name, tp, tp - 1), plan_of(name, number))


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_geometry_is_the_same_after_it_was_sent(name: str) -> None:
    for number, tp in ((0, 1), (1, 2)):
        geometry = family(name, number, tp)
        assert Geometry.from_json(sent(geometry)) == geometry


def test_a_geometry_has_tables_groups_and_taps() -> None:
    geometry = family("llama", 1)
    assert geometry.block_tokens == 8
    assert set(geometry.tables) == {"full.0", "full.1", "tap1"}
    assert {name: group.role for name, group in geometry.groups.items()} == {"full": Role.FULL, "tap1": Role.TAP}
    assert geometry.num_pages("full.0") > 100


def test_a_state_of_several_pages_says_so() -> None:
    model = spec_of("mamba2")
    counts = {geometry_of(model, {"memory_bytes": size << 10, "row_layers": 1}).tables["state"].pages_per_item
              for size in (200, 8000)}  # fmt: skip
    assert len(counts) == 2
    assert min(counts) == 1


def full_bytes(model: ModelSpec, num_tokens: int, block_tokens: int) -> int:
    """One page size for all layers: a block has as many tokens as fit into the bytes of a layer's state."""
    states = [spec.nbytes for spec in model.layers if isinstance(spec, LinearState)]
    per_token = [spec.nbytes for spec in model.layers if isinstance(spec, AttentionLayer)]
    block = max(block_tokens, math.ceil(max(states, default=0) / max(per_token))) if per_token else block_tokens
    num_blocks = math.ceil(num_tokens / block_tokens)
    return sum(per_token) * num_blocks * block_tokens + sum(states) * math.ceil(num_tokens / block)


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_of_full_attention(name: str) -> None:
    assert family(name).full_attention_bytes(100) == full_bytes(spec_of(name), 100, 16)
    assert family(name).full_attention_bytes(0) == 0


@quick
@given(models())
def test_random_models_survive_json(model: Any) -> None:
    geometry = geometry_of(model.spec(2, 1), {"memory_bytes": 2 << 20})
    assert Geometry.from_json(sent(geometry)) == geometry


# --- values from another process --------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all entries."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in entries:
        yield (*path, key)
        yield from leaves(one, (*path, key))


def changed(value: dict[str, Any], path: tuple[Any, ...], new: Any) -> dict[str, Any]:
    result = copy.deepcopy(value)
    place: Any = result
    for key in path[:-1]:
        place = place[key]
    if new is None:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return result


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(LinkMismatch, match=f"format {FORMAT + 1}, this version of hybridkv reads {FORMAT}"):
        Geometry.from_json({"format": FORMAT + 1, "other": 1})
    with pytest.raises(LinkMismatch, match="geometry has no 'format'"):
        Geometry.from_json({})
    others: list[object] = [None, 3, [], "{}"]
    for wrong in others:
        with pytest.raises(LinkMismatch, match="not an object"):
            Geometry.from_json(wrong)


def test_a_missing_field_is_refused() -> None:
    """But for a table, a group or an element of a list: what is left may be sound."""
    written = sent(family("qwen3_next"))
    named = [path for path in leaves(written) if isinstance(path[-1], str) and len(path) not in (2,)]
    for path in random.Random(0).sample(named, 60):
        with pytest.raises(LinkMismatch, match=f"has no '{path[-1]}'"):
            Geometry.from_json(changed(written, path, None))


@pytest.mark.parametrize("new", [-1, 2**60, 1.5, True, "a", [], {}])
def test_a_wrong_type_is_refused(new: object) -> None:
    written = sent(family("falcon_h1"))
    numbers = [path for path in leaves(written) if isinstance(_at(written, path), int)]
    for path in random.Random(1).sample([path for path in numbers if path[-1] != "is_writer"], 40):
        with pytest.raises(LinkMismatch):
            Geometry.from_json(changed(written, path, new))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_number_leads_outside_an_arena(data: st.DataObject) -> None:
    """A changed geometry is refused, or what it leads to stays inside both arenas."""
    ours = _OURS[data.draw(st.sampled_from(sorted(_OURS)))]
    written = sent(ours)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([path for path in leaves(written) if type(_at(written, path)) is int]))
        new = data.draw(st.one_of(st.integers(0, 40), st.integers(0, 2**50), st.just(_at(written, path) * 2)))
        written = changed(written, path, new)
    try:
        theirs = Geometry.from_json(written)
        cut = Cutter(ours, theirs)
        last = {name: [theirs.num_pages(name) - 1] * table.pages_per_item for name, table in theirs.tables.items()}
        had = {name: [ours.num_pages(name) - 1] * table.pages_per_item for name, table in ours.tables.items()}
        states = {name for name, table in ours.tables.items() if table.role is Role.STATE}
        parcels = cut.parcels(
            PageTables({n: p for n, p in had.items() if n not in states}, {n: had[n] for n in states}),
            PageTables({n: p for n, p in last.items() if n not in states}, {n: last[n] for n in states}),
            0,
            min(ours.block_tokens, theirs.block_tokens),
        )
    except LinkMismatch:
        return
    for parcel in parcels:
        assert parcel.source.min() >= 0
        assert parcel.target.min() >= 0
        assert (parcel.source + parcel.nbytes).max() <= ours.arena_bytes
        assert (parcel.target + parcel.nbytes).max() <= theirs.arena_bytes


_OURS = {name: family(name) for name in ("llama", "gemma3", "qwen3_next")}


def test_fields_that_are_not_contiguous_are_refused() -> None:
    """Pages of another engine's memory may be laid out so; these are not linked."""
    from hybridkv.cache import CacheLayout
    from hybridkv.stream import Catalogue
    from hybridkv.stream.form import Chunk, StoredGroup, StoredLayer

    plan = make_plan(spec_of("llama"), PlanOptions(memory_bytes=1 << 20))
    catalogue = Catalogue(plan, CacheLayout.from_plan(plan), "weights")

    def placed(group: StoredGroup) -> StoredGroup:
        first = group.chunks[0]
        layer = first.layers[0]
        fields = tuple(one._replace(page_stride=512) for one in layer.fields)
        moved = StoredLayer(layer.layer, layer.num_pieces, fields, layer.parts)
        chunk = Chunk(first.grid, first.table, first.row, 0, (moved,))
        return StoredGroup(
            group.name, group.role, group.sight, group.slices, group.share, group.is_writer, (moved,), (chunk,)
        )

    catalogue.place(placed)
    with pytest.raises(LinkMismatch, match="table 'full' has a field that is not contiguous"):
        Geometry.of(catalogue, arena_bytes=plan.arena_bytes, identity="weights")
