"""One buffer of bytes on a device, seen through strided views. Addresses come from the plan and nowhere else.

The cache core decides what lies where; this module only carries out its operations, in order. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from hybridkv.cache import CacheLayout, CopyPage, Operation, ZeroPage, ZeroSlab
from hybridkv.errors import InputError
from hybridkv.memory.uploads import Uploader
from hybridkv.plan import GroupPlan, PartView, Plan
from hybridkv.spec import DType, HiddenTap, LayerSpec, LinearState

_WORD = torch.int64
"""What pages are copied as: strides are multiples of 256 bytes."""

_LARGE_PAGE_BYTES = 1 << 20
"""Pages beyond this are copied one by one: gathering many first would take as much memory again."""


class LayerMemory(NamedTuple):
    """What one layer has in the arena, for one of its kinds: attention, state, or tap."""

    group: str
    spec: LayerSpec
    page: int
    """Which page of its item: not 0 only for states that are cut into several pages."""
    parts: dict[str, torch.Tensor]
    """Over all pages of the arena: `[pages, tokens, heads, dim]` for tokens, `[pages, *shape]` for states."""


class Memory:
    """The arena of one plan on one device. It starts out zero."""

    def __init__(self, plan: Plan, layout: CacheLayout, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        try:
            self.buffer = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise InputError(f"no {plan.arena_bytes:,} bytes on {device}: give the engine less memory") from error
        self._uploader = Uploader(device)
        self.tokens: dict[int, LayerMemory] = {}
        self.states: dict[int, LayerMemory] = {}
        self.taps: dict[int, LayerMemory] = {}
        for group in plan.groups:
            self._add_views(group)
        groups = {group.pool_name: group for group in (*layout.token_groups, *layout.state_groups)}
        self._pages = {name: self._words_of(group.page_bytes) for name, group in groups.items()}
        self._slab_pages = {name: group.pages_per_slab for name, group in groups.items()}

    def attention(self, layer: int) -> LayerMemory:
        """What the attention of `layer` keeps."""
        return _find(self.tokens, layer, "attention")

    def state(self, layer: int) -> LayerMemory:
        """What the linear part of `layer` keeps."""
        return _find(self.states, layer, "a state")

    def run(self, operations: Sequence[Operation]) -> None:
        """Carry out copies and zeroing in order. On a GPU they are only submitted, in order with the steps."""
        for batch in _independent(operations):
            first = batch[0]
            pages = self._pages[first.pool]
            if isinstance(first, CopyPage):
                self._copy(pages, [op for op in batch if isinstance(op, CopyPage)])
            elif isinstance(first, ZeroPage):
                pages[first.page].zero_()
            else:
                count = self._slab_pages[first.pool]
                pages[first.slab * count : (first.slab + 1) * count].zero_()

    def _copy(self, pages: torch.Tensor, copies: Sequence[CopyPage]) -> None:
        if len(copies) < 3 or pages.shape[1] * pages.element_size() > _LARGE_PAGE_BYTES:
            for copy in copies:
                pages[copy.dst].copy_(pages[copy.src])
            return
        self._uploader.begin()
        sent = self._uploader.send("copies", src=[copy.src for copy in copies], dst=[copy.dst for copy in copies])
        pages.index_copy_(0, sent["dst"], pages.index_select(0, sent["src"]))

    def _words_of(self, stride_bytes: int) -> torch.Tensor:
        """Every page of a pool as a row of words."""
        words = self.buffer.view(_WORD)
        per_page = stride_bytes // words.element_size()
        return words[: len(words) // per_page * per_page].view(-1, per_page)

    def _add_views(self, group: GroupPlan) -> None:
        kept = self._kept_by(group.specs[0])
        specs = {spec.layer: spec for spec in group.specs}
        for row in group.rows:
            for view in row.views:
                one = kept.setdefault(view.layer, LayerMemory(group.name, specs[view.layer], row.page, {}))
                one.parts[view.part] = self._strided(group, view)

    def _kept_by(self, spec: LayerSpec) -> dict[int, LayerMemory]:
        if isinstance(spec, HiddenTap):
            return self.taps
        return self.states if isinstance(spec, LinearState) else self.tokens

    def _strided(self, group: GroupPlan, view: PartView) -> torch.Tensor:
        dtype = torch_dtype(view.dtype)
        num_pages = self.plan.num_slabs * group.pages_per_slab
        strides = [stride // dtype.itemsize for stride in (group.stride_bytes, *view.strides_bytes)]
        offset = view.offset_bytes // dtype.itemsize
        return self.buffer.view(dtype).as_strided((num_pages, *view.shape), strides, offset)


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _find(kept: Mapping[int, LayerMemory], layer: int, what: str) -> LayerMemory:
    try:
        return kept[layer]
    except KeyError:
        raise InputError(f"layer {layer} keeps no {what} in this plan: layers that do are {sorted(kept)}") from None


def _independent(operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """The operations in order, copies together as long as none reads or writes what one before it writes."""
    batch: list[Operation] = []
    written: set[int] = set()
    for op in operations:
        if isinstance(op, (ZeroSlab, ZeroPage)):
            if batch:
                yield batch
            yield (op,)
            batch, written = [], set()
            continue
        if batch and (op.pool != batch[0].pool or op.src in written or op.dst in written):
            yield batch
            batch, written = [], set()
        batch.append(op)
        written.add(op.dst)
    if batch:
        yield batch
