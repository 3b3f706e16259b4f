"""What a transfer takes by the plan alone: bytes and descriptors of one prompt, for models of the catalogue.

Ours against two others. *All full*: every layer is treated as full attention (`Geometry.full_attention_bytes`), one
descriptor for each layer and block of 16 tokens. *A region a layer*: only what is visible is sent, in as many
descriptors for each layer. A state of a linear layer takes four, as in vLLM's NIXL connector (three parts of the
convolution, and the recurrent state). NIXL merges neighbours of prepared lists itself; counts are before that.
Only offsets are computed: no memory of that size is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hybridkv.cache import CacheLayout, Role
from hybridkv.link.geometry import Geometry
from hybridkv.link.runs import Cutter, PageTables
from hybridkv.models import load_model
from hybridkv.plan import PlanOptions, make_plan
from hybridkv.stream import Catalogue

MODELS = ("gemma-3-27b", "gpt-oss-120b", "qwen3.5-397b-a17b")
LENGTHS = (2048, 8192, 32768)
MEMORY_BYTES = 80 * 2**30
STATE_DESCRIPTORS = 4
"""Descriptors of one linear layer in vLLM's NIXL connector."""


def run(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    rows = []
    for name in MODELS:
        plan = make_plan(load_model(name), PlanOptions(MEMORY_BYTES))
        catalogue = Catalogue(plan, CacheLayout.from_plan(plan), "weights")
        geometry = Geometry.of(catalogue, arena_bytes=plan.arena_bytes, identity="weights")
        cutter = Cutter(geometry, geometry)
        rows += [_row(name, cutter, num_tokens) for num_tokens in lengths]
    return rows


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="bytes and descriptors of a prompt, TP 1, bf16 KV, fp32 states")
    for column in ("model", "tokens", "MiB", "all full MiB", "ratio", "descriptors, pages in order", "at random"):
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_column("a region a layer", justify="right")
    table.add_column("all full", justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["tokens"]),
            f"{row['bytes'] / 2**20:.1f}",
            f"{row['full_attention_bytes'] / 2**20:.1f}",
            f"{row['bytes_ratio']:.3f}",
            str(row["descriptors_in_order"]),
            str(row["descriptors_at_random"]),
            str(row["descriptors_region_per_layer"]),
            str(row["descriptors_all_full"]),
        )
    console.print(table)


def _row(name: str, cutter: Cutter, num_tokens: int) -> dict[str, Any]:
    geometry = cutter.source
    in_order = _sent(cutter, num_tokens, None)
    at_random = _sent(cutter, num_tokens, np.random.default_rng(7))
    assert in_order[0] <= at_random[0] * 1.02, "padding between pages is all that pages in order may add"
    full_bytes = geometry.full_attention_bytes(num_tokens)
    return {
        "model": name,
        "tokens": num_tokens,
        "bytes": at_random[0],
        "full_attention_bytes": full_bytes,
        "bytes_ratio": round(at_random[0] / full_bytes, 4),
        "descriptors_in_order": in_order[1],
        "descriptors_at_random": at_random[1],
        "descriptors_region_per_layer": _by_layer(geometry, num_tokens, everything=False),
        "descriptors_all_full": _by_layer(geometry, num_tokens, everything=True),
    }


def _sent(cutter: Cutter, num_tokens: int, random: np.random.Generator | None) -> tuple[int, int]:
    """Bytes and descriptors. `random`: pages of both sides are drawn from the arena, else they are consecutive."""
    source, target = (_tables(cutter.source, num_tokens, random) for _ in range(2))
    parcels = cutter.parcels(source, target, 0, num_tokens)
    return sum(parcel.total_bytes for parcel in parcels), sum(len(parcel.nbytes) for parcel in parcels)


def _tables(geometry: Geometry, num_tokens: int, random: np.random.Generator | None) -> PageTables:
    """Pages of the blocks that are visible from the end of a prompt, and of the state there."""
    tables, states = {}, {}
    for name, table in geometry.tables.items():
        if table.role is Role.STATE:
            states[name] = _pages(geometry.num_pages(name), table.pages_per_item, random)
        elif table.role is not Role.TAP:
            num_blocks, first = _blocks(geometry, name, num_tokens)
            tables[name] = [0] * first + _pages(geometry.num_pages(name), num_blocks - first, random)
    return PageTables(tables, states)


def _pages(num_pages: int, count: int, random: np.random.Generator | None) -> list[int]:
    if random is None:
        return list(range(1, count + 1))
    return [int(page) + 1 for page in random.permutation(num_pages - 1)[:count]]


def _blocks(geometry: Geometry, table: str, num_tokens: int) -> tuple[int, int]:
    """All blocks of a prompt, and the first that is visible from its end."""
    group = next(group for group, _ in geometry.rows_in(table))
    first = group.sight.first_visible(num_tokens)
    return -(-num_tokens // geometry.block_tokens), max(0, first) // geometry.block_tokens


def _by_layer(geometry: Geometry, num_tokens: int, *, everything: bool) -> int:
    """Descriptors of a system with one region a layer."""
    count = 0
    for group in geometry.groups.values():
        if group.role is Role.STATE:
            count += STATE_DESCRIPTORS * len(group.layers) * (_num_states(geometry, num_tokens) if everything else 1)
        elif group.role is not Role.TAP:
            num_blocks, first = _blocks(geometry, group.rows[0].table, num_tokens)
            count += len(group.layers) * (num_blocks if everything else num_blocks - first)
    return count


def _num_states(geometry: Geometry, num_tokens: int) -> int:
    """States that `full_attention_bytes` counts: one for each block of the size that one page size forces."""
    whole = -(-num_tokens // geometry.block_tokens) * geometry.block_tokens
    groups = geometry.groups.values()
    tokens = sum(group.item_bytes for group in groups if group.role in (Role.FULL, Role.LOCAL))
    states = sum(group.item_bytes for group in groups if group.role is Role.STATE)
    return (geometry.full_attention_bytes(num_tokens) - whole * tokens) // states
