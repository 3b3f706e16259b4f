"""The plan: groups, rows, pages, strides, slabs and capacity of one rank's cache, decided before anything is allocated.

Conflicts between options are found here, once. Everything above reads the plan and never computes an address from
anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hybridkv.errors import PlanError
from hybridkv.plan.layout import PageLayout, Row, check_row_order, lay_out, most_pages
from hybridkv.plan.slabs import PADDING_LIMIT, PAGE_ALIGN_BYTES, PageNeed, SlabChoice, choose_slab, smallest_arena
from hybridkv.spec import FullAttention, HiddenTap, LayerSpec, LinearState, ModelSpec
from hybridkv.units import format_at_least, format_bytes

DEFAULT_BLOCK_TOKENS = 16
MOST_BLOCK_TOKENS = 65536
DEFAULT_ROW_LAYERS = 4
DEFAULT_ROW_ORDER = "hlkt"
_ENOUGH_PAGES = 16
"""Blocks that a slab holds at least, in an arena of many slabs."""
_MANY_SLABS = 4096
"""Slabs that an arena keeps at least, if several are made one at all."""
_MOST_TAP_LOSS = 1 / 200
"""The part of the memory that one slab may take so that tapped layers fit into it better."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a user may choose. Every default works for every model."""

    memory_bytes: int
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    attn_pack_size: int | None = None
    """Full-attention layers that share a page; None: all of them."""
    row_layers: int = DEFAULT_ROW_LAYERS
    row_order: str = DEFAULT_ROW_ORDER

    def check(self) -> None:
        """Refuse what no model can be planned with. `make_plan` checks the rest: what depends on the model."""
        if not 1 <= self.block_tokens <= MOST_BLOCK_TOKENS:
            raise PlanError(
                f"block of {self.block_tokens} tokens: a block has 1 to {MOST_BLOCK_TOKENS} tokens, "
                f"{DEFAULT_BLOCK_TOKENS} is usual"
            )
        if self.row_layers < 1:
            raise PlanError(
                f"rows of {self.row_layers} layers: a row has at least 1 layer, {DEFAULT_ROW_LAYERS} is usual"
            )
        check_row_order(self.row_order)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Layers of one kind that share one page table."""

    name: str
    specs: tuple[LayerSpec, ...]
    layout: PageLayout
    stride_bytes: int
    pages_per_slab: int
    slab_bytes: int

    @property
    def kind(self) -> str:
        return self.specs[0].kind

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(spec.layer for spec in self.specs)

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.layout.rows

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def padding_ratio(self) -> float:
        """The part of this group's slabs that holds nothing."""
        return 1 - self.layout.item_bytes * self.pages_per_slab / (self.layout.pages * self.slab_bytes)

    def row_of(self, layer: int) -> Row:
        """The one row that holds `layer`."""
        for row in self.rows:
            if layer in row.layers:
                return row
        raise PlanError(f"layer {layer} is not in group {self.name!r}: its layers are {list(self.layers)}")

    def page_offset(self, page: int) -> int:
        """Where page `page` begins in the arena: at `page * stride_bytes`, but for tapped layers.

        A slab is a whole number of strides of every other group. In a slab of tapped layers some bytes are left over.
        """
        slab, index = divmod(page, self.pages_per_slab)
        return slab * self.slab_bytes + index * self.stride_bytes

    def held_pages(self, num_tokens: int, block_tokens: int) -> int:
        """The most pages one request of `num_tokens` holds at once; `block_tokens` is the plan's."""
        return self.specs[0].held_blocks(num_tokens, block_tokens) * self.layout.pages


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of one rank: `num_slabs` slabs, of which slab 0 is the null slab."""

    model: ModelSpec
    options: PlanOptions
    slab_bytes: int
    num_slabs: int
    groups: tuple[GroupPlan, ...]

    @property
    def arena_bytes(self) -> int:
        """What is allocated: the memory rounded down to whole slabs."""
        return self.slab_bytes * self.num_slabs

    @property
    def padding_ratio(self) -> float:
        """The part of the arena that padding may take at most, whatever it is filled with."""
        return max(group.padding_ratio for group in self.groups)

    def group(self, name: str) -> GroupPlan:
        for group in self.groups:
            if group.name == name:
                return group
        raise PlanError(f"no group {name!r} in the plan of {self.model.name}: {[g.name for g in self.groups]}")

    def page_offset(self, group: GroupPlan, page: int) -> int:
        """Where page `page` of `group` begins in the arena."""
        if not 0 <= page < self.num_slabs * group.pages_per_slab:
            raise PlanError(f"page {page} of group {group.name!r} is outside the arena")
        return group.page_offset(page)

    def slabs_for(self, num_requests: int, num_tokens: int) -> int:
        """Slabs that many requests of that length hold, each with its own tokens and one working state."""
        return sum(
            -(-num_requests * group.held_pages(num_tokens, self.options.block_tokens) // group.pages_per_slab)
            for group in self.groups
        )

    def max_requests(self, num_tokens: int) -> int:
        """How many requests of that length fit at once, sharing nothing."""
        if num_tokens < 1:
            raise PlanError(f"requests of {num_tokens} tokens: a request has at least 1 token")
        free = self.num_slabs - 1
        low, high = 0, 1
        while self.slabs_for(high, num_tokens) <= free:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.slabs_for(middle, num_tokens) <= free else (low, middle)
        return low

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes one request of that length takes, padding included."""
        held = (group.held_pages(num_tokens, self.options.block_tokens) * group.stride_bytes for group in self.groups)
        return sum(held)


def make_plan(model: ModelSpec, options: PlanOptions) -> Plan:
    """Decide everything about the memory of `model`."""
    options.check()
    _check_model(model, options)
    taps = [spec for spec in model.layers if isinstance(spec, HiddenTap)]
    groups = split_into_groups([spec for spec in model.layers if spec not in taps], options.attn_pack_size)
    layouts, choice = _choose_layouts(groups, options)
    if choice is None:
        needed = _smallest_arena(groups, options)
        raise PlanError(
            f"{format_bytes(options.memory_bytes)} is too little for {model.name} at TP {model.tp}: "
            f"give it at least {format_at_least(needed)}"
        )
    slab_bytes = choice.slab_bytes * _slabs_together(groups, choice, options.memory_bytes)
    tap_layout = lay_out(taps, options.block_tokens, options.row_layers, options.row_order) if taps else None
    if tap_layout is not None:
        slab_bytes *= _slabs_for_taps(_tap_stride(tap_layout), slab_bytes, options.memory_bytes)
    planned = [
        GroupPlan(name, specs, layout, stride, slab_bytes // stride, slab_bytes)
        for (name, specs), layout, stride in zip(groups.items(), layouts, choice.strides_bytes, strict=True)
    ]
    if tap_layout is not None and _tap_stride(tap_layout) <= slab_bytes:
        stride = _tap_stride(tap_layout)
        planned.append(GroupPlan(taps[0].group, tuple(taps), tap_layout, stride, slab_bytes // stride, slab_bytes))
    return Plan(model, options, slab_bytes, options.memory_bytes // slab_bytes, tuple(planned))


def _tap_stride(layout: PageLayout) -> int:
    return -(-layout.page_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


def _slabs_for_taps(stride_bytes: int, slab_bytes: int, memory_bytes: int) -> int:
    """How many slabs make one, so that pages of tapped layers leave little of a slab unused.

    The slab is chosen for all other groups. They keep their strides; for them a larger slab costs next to nothing.
    """
    most = max(1, int(_MOST_TAP_LOSS * memory_bytes / slab_bytes))
    unused = {m: m * slab_bytes % stride_bytes / (m * slab_bytes) for m in range(1, most + 1)}
    fit = [m for m, ratio in unused.items() if ratio <= PADDING_LIMIT]
    return fit[0] if fit else min(unused, key=lambda m: unused[m])


def _slabs_together(groups: Mapping[str, tuple[LayerSpec, ...]], choice: SlabChoice, memory_bytes: int) -> int:
    """How many chosen slabs make one: the cache keeps its books by slab, so many tiny slabs are slow.

    Only blocks count, of which there are many. A slab of few states is free for others as soon as these are gone.
    """
    sizes = zip(groups.values(), choice.strides_bytes, strict=True)
    per_slab = [choice.slab_bytes // stride for specs, stride in sizes if not isinstance(specs[0], LinearState)]
    fewest, num_slabs = min(per_slab, default=_ENOUGH_PAGES), memory_bytes // choice.slab_bytes
    together = 1
    while fewest * together < _ENOUGH_PAGES and num_slabs > 2 * together * _MANY_SLABS:
        together *= 2
    return together


def split_into_groups(layers: Sequence[LayerSpec], attn_pack_size: int | None) -> dict[str, tuple[LayerSpec, ...]]:
    """Layers by group name, in the order of their first layer; full attention in packs where a size is given."""
    groups: dict[str, tuple[LayerSpec, ...]] = {}
    ordered = sorted(layers, key=lambda spec: (spec.group, spec.layer))
    for name, members in groupby(ordered, key=lambda spec: spec.group):
        specs = tuple(members)
        if attn_pack_size is None or not isinstance(specs[0], FullAttention) or attn_pack_size == len(specs):
            groups[name] = specs
            continue
        for index, start in enumerate(range(0, len(specs), attn_pack_size)):
            groups[f"{name}.{index}"] = specs[start : start + attn_pack_size]
    return dict(sorted(groups.items(), key=lambda item: (isinstance(item[1][0], HiddenTap), item[1][0].layer)))


def _choose_layouts(
    groups: Mapping[str, tuple[LayerSpec, ...]], options: PlanOptions
) -> tuple[list[PageLayout], SlabChoice | None]:
    """Whole states in one page if the arena is large against them; else cut them where that loses less."""
    best: tuple[list[PageLayout], SlabChoice | None] = ([], None)
    for cuts in range(1, _most_cuts(groups, options) + 1):
        layouts = _layouts(groups, options, cuts)
        choice = choose_slab(_needs(layouts, groups), options.memory_bytes)
        if choice is not None and (best[1] is None or choice.rank < best[1].rank):
            best = (layouts, choice)
        if best[1] is not None and best[1].loss_bytes <= PADDING_LIMIT * options.memory_bytes:
            break
    return best


def _layouts(groups: Mapping[str, tuple[LayerSpec, ...]], options: PlanOptions, cuts: int) -> list[PageLayout]:
    return [
        lay_out(
            specs,
            options.block_tokens,
            options.row_layers,
            options.row_order,
            pages=min(cuts, most_pages(specs, options.row_layers)),
        )
        for specs in groups.values()
    ]


def _most_cuts(groups: Mapping[str, tuple[LayerSpec, ...]], options: PlanOptions) -> int:
    return max(most_pages(specs, options.row_layers) for specs in groups.values())


def _needs(layouts: Sequence[PageLayout], groups: Mapping[str, tuple[LayerSpec, ...]]) -> list[PageNeed]:
    """The smallest workable arena holds one block of every kind and two states: one to read, one to write."""
    return [
        PageNeed(
            layout.page_bytes,
            layout.item_bytes / layout.pages,
            min_pages=layout.pages * (2 if isinstance(specs[0], LinearState) else 1),
        )
        for layout, specs in zip(layouts, groups.values(), strict=True)
    ]


def _smallest_arena(groups: Mapping[str, tuple[LayerSpec, ...]], options: PlanOptions) -> int:
    return min(
        smallest_arena(_needs(_layouts(groups, options, cuts), groups))
        for cuts in range(1, _most_cuts(groups, options) + 1)
    )


def _check_model(model: ModelSpec, options: PlanOptions) -> None:
    if all(isinstance(spec, HiddenTap) for spec in model.layers):
        raise PlanError(f"no layer of {model.name} keeps anything: there is no cache to plan")
    if options.attn_pack_size is not None:
        _check_pack_size(model, options.attn_pack_size)


def _check_pack_size(model: ModelSpec, pack_size: int) -> None:
    packable = sum(isinstance(spec, FullAttention) for spec in model.layers)
    if packable == 0:
        raise PlanError(f"attention pack size {pack_size}: {model.name} has no full-attention layers; leave it out")
    if not 1 <= pack_size <= packable:
        raise PlanError(
            f"attention pack size {pack_size}: {model.name} has {packable} full-attention layers; "
            f"choose 1 to {packable}, or leave it out to pack them all"
        )
