"""What an engine stored is loaded and stored again by ranks of other sizes and plans, and an engine resumes from that.

Every logit of the last engine is compared with the stock model's.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hybridkv.models.reader import read_config
from hybridkv.spec import DType, FullAttention, ModelSpec
from hybridkv.store import MemoryStore
from hybridkv.stream import DumpPoint
from tests.stream.drive import STRETCH_TOKENS, StreamDriver, filled, identity_of, model_of, plain_store
from tests.stream.faults import copy_of
from tests.stream.ranks import Rank
from tests.stream.test_faults import SHARED, STORED
from tests.stream.test_restart import BRIEF, cached_by

FEW_OF_EACH = ["llama", "gemma3", "llama4", "qwen3_next", "falcon_h1", "kimi_linear", "mamba2"]
RESUME = 80
"""Where a prompt of 90 tokens can be resumed."""
ENDS = (32, 64, RESUME)
"""Where the objects end that are needed for that."""
PLANS: list[dict[str, Any]] = [
    {"attn_pack_size": None, "row_layers": 1, "row_order": "hlkt"},
    {"attn_pack_size": 1, "row_layers": 4, "row_order": "tklh"},
    {"attn_pack_size": 2, "row_layers": 2, "row_order": "lkth"},
]


def plan_options(family: str, number: int) -> dict[str, Any]:
    """One of `PLANS`, with no larger packs than the family has full-attention layers."""
    options, spec = dict(PLANS[number]), spec_of(family, 1, 0)
    packable = sum(isinstance(layer, FullAttention) for layer in spec.layers)
    return {**options, "attn_pack_size": options["attn_pack_size"] if packable > 1 else None}


@functools.cache
def spec_of(family: str, tp: int, rank: int) -> ModelSpec:
    """The cache of one rank, with the types that an engine of one rank has."""
    config = model_of(family).config.to_dict()
    return read_config(config, name=family, tp=tp, rank=rank, kv_cache_dtype=DType.FLOAT32)


def pass_on(family: str, source: MemoryStore, tp: int, options: dict[str, Any]) -> MemoryStore:
    """Each rank loads its slices of a prompt's cache, and dumps them into another store."""
    target = plain_store()
    for number in reversed(range(tp)):
        rank = Rank(
            spec_of(family, tp, number), source, identity_of(model_of(family)), STRETCH_TOKENS, number, **options
        )
        assert rank.found(SHARED, len(SHARED)) == RESUME
        for end in [RESUME] if rank.catalogue.state_groups else ENDS:
            request = rank.request(end, [end], first_of=rank.visible(end))
            rank.use(source)
            load = rank.load(request, SHARED)
            assert load.failure is None, load.error
            rank.use(target)
            rank.dump(request, SHARED, [DumpPoint(e, e == end) for e in ENDS if e <= end])
        assert rank.stats.dumps_failed == rank.stats.dumps_dropped == 0
        rank.close()
    return target


def check_resumes(family: str, store: MemoryStore, options: dict[str, Any]) -> None:
    driver = StreamDriver(model_of(family), store, **options)
    assert cached_by(driver) == RESUME
    assert not driver.stats.failures


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FEW_OF_EACH)
def test_an_engine_resumes_from_what_ranks_passed_on(family: str, tp: int) -> None:
    target = pass_on(family, copy_of(filled(family, STORED)), tp, plan_options(family, 1))
    written = {stored.name.group for stored in target.objects()}
    assert any(".1of" in name for name in written), written
    check_resumes(family, target, plan_options(family, 2))


@pytest.mark.parametrize(("writer", "reader"), [(0, 1), (1, 2), (2, 0)])
@pytest.mark.parametrize("family", FEW_OF_EACH)
def test_an_engine_resumes_from_what_another_plan_stored(family: str, writer: int, reader: int) -> None:
    store = plain_store()
    first = StreamDriver(model_of(family), store, **plan_options(family, writer))
    first.add("a", SHARED, BRIEF)
    first.run()
    first.settle()
    again = copy_of(store)
    first.close()
    check_resumes(family, again, plan_options(family, reader))
