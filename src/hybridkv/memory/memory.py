"""One buffer of bytes on a device, seen through strided views. Addresses come from the plan and nowhere else.

The cache core decides what lies where; this module only carries out its operations, in order. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from hybridkv.cache import CacheGroup, CacheLayout, CopyPage, Operation, ZeroPage, ZeroSlab
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
    """Over all pages of the arena: `[pages, tokens, heads, dim]` for tokens, `[pages, *shape]` for states.

    For taps `[slabs, pages of a slab, tokens, 1, hidden]`.
    """


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
        groups = {group.pool_name: group for group in layout.groups}
        self._pages = {name: self._words_of(group) for name, group in groups.items()}

    def attention(self, layer: int) -> LayerMemory:
        """What the attention of `layer` keeps."""
        return _find(self.tokens, layer, "attention")

    def state(self, layer: int) -> LayerMemory:
        """What the linear part of `layer` keeps."""
        return _find(self.states, layer, "a state")

    def tap(self, layer: int) -> LayerMemory:
        """What is kept of the hidden states that enter `layer`."""
        return _find(self.taps, layer, "hidden states")

    def run(self, operations: Sequence[Operation]) -> None:
        """Carry out copies and zeroing in order. On a GPU they are only submitted, in order with the steps."""
        for batch in _independent(operations):
            first = batch[0]
            pages = self._pages[first.pool]
            if isinstance(first, CopyPage):
                self._copy(pages, [op for op in batch if isinstance(op, CopyPage)])
            elif isinstance(first, ZeroPage):
                pages[divmod(first.page, pages.shape[1])].zero_()
            else:
                pages[first.slab].zero_()

    def _copy(self, pages: torch.Tensor, copies: Sequence[CopyPage]) -> None:
        per_slab = pages.shape[1]
        if len(copies) < 3 or pages.shape[2] * pages.element_size() > _LARGE_PAGE_BYTES:
            for copy in copies:
                pages[divmod(copy.dst, per_slab)].copy_(pages[divmod(copy.src, per_slab)])
            return
        self._uploader.begin()
        sent = self._uploader.send("copies", src=[copy.src for copy in copies], dst=[copy.dst for copy in copies])
        src, dst = sent["src"], sent["dst"]
        if pages.is_contiguous():
            pages = pages.view(-1, pages.shape[2])
            pages.index_copy_(0, dst, pages.index_select(0, src))
        else:
            pages[dst // per_slab, dst % per_slab] = pages[src // per_slab, src % per_slab]

    def _words_of(self, group: CacheGroup) -> torch.Tensor:
        """All pages of a pool as words: `[slabs, pages of a slab, words]`."""
        words, per_page = self.buffer.view(_WORD), group.page_bytes // _WORD.itemsize
        per_slab = self.plan.slab_bytes // _WORD.itemsize
        shape = self.plan.num_slabs, group.pages_per_slab, per_page
        return words.as_strided(shape, (per_slab, per_page, 1))

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
        pages = [self.plan.num_slabs * group.pages_per_slab]
        strides_bytes = [group.stride_bytes]
        if isinstance(group.specs[0], HiddenTap):  # their pages leave some bytes of a slab
            pages = [self.plan.num_slabs, group.pages_per_slab]
            strides_bytes = [group.slab_bytes, group.stride_bytes]
        strides = [stride // dtype.itemsize for stride in (*strides_bytes, *view.strides_bytes)]
        offset = view.offset_bytes // dtype.itemsize
        return self.buffer.view(dtype).as_strided((*pages, *view.shape), strides, offset)


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
