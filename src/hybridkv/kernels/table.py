"""What one token group's attention needs to know in one packed step, and the masks it shares between layers.

Built once a step by `tokens.make_token_table`. It knows pages and positions, no heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.kernels.cover import Tile, Visible
from hybridkv.memory import Uploader
from hybridkv.sight import Sight

Ints = NDArray[np.int64]


class AttentionNeed(NamedTuple):
    """What the attention of a layer asks of its table."""

    dtype: torch.dtype
    """Type of the queries."""
    num_folded: int
    """Query heads that share a KV head."""
    is_fused: bool
    """It needs no mask where causality is all that hides keys."""
    pitches: tuple[int, ...] | None
    """Not None: its tokens are gathered before. Slots from one page to the next, where that is a whole number."""


@dataclass(slots=True)
class Bucket:
    """Spans of one short length, batched: S queries each, L = blocks * block_tokens gathered slots each."""

    at: int
    """Its place among the buckets."""
    members: list[int]
    """Which spans, in row order."""
    num_queries: int
    """S: tokens of each span."""
    num_slots: int
    """L: slots gathered for each span, or as many of them as `cut` leaves."""
    rows: slice | torch.Tensor
    """Packed rows of the queries, [n * S]."""
    pages: torch.Tensor
    """[n * blocks]; the null page pads."""
    cut: slice | None
    """All members see these same slots: nothing is padded and nothing stale."""
    stale: torch.Tensor
    """Slots of [n * L] that belong to no visible token, in pages that are read."""
    first: torch.Tensor
    last: torch.Tensor
    """[n, S, 1]: the slots each query sees, both included."""

    picks: torch.Tensor | slice | None = None
    """The same slots as indices of what `gather_tokens` returns; made when first asked for."""
    masks: dict[tuple[torch.dtype, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.members) * self.num_queries


@dataclass(slots=True)
class TiledSpan:
    """A span by itself: its tiles take their keys out of what was gathered once."""

    visible: Visible
    tiles: list[Tile]
    square: bool
    pages: torch.Tensor
    """[blocks]"""
    origin: int
    """Position of the first gathered slot."""
    picks: slice
    """Its part of what `gather_tokens` returns."""


@dataclass
class TokenTable:
    """What attention of one token group needs to know of a packed step of N tokens."""

    block_tokens: int
    sight: Sight
    uploader: Uploader
    name: str
    visibles: list[Visible]
    """What each span sees; of padding, only where `make_token_table` leaves it in."""
    visible_lengths: list[int]
    """Tokens each span sees."""
    pages: torch.Tensor
    offsets: torch.Tensor
    """[N]: where each token of the step is written; -1 for padding."""
    padded: torch.Tensor | None
    """[N]: whether each token is padding, if any is."""
    buckets: list[Bucket]
    tiled_spans: list[TiledSpan]
    host_pages: list[Ints]
    """Of each span: the pages of its visible blocks."""
    columns: dict[tuple[torch.dtype, Tile], torch.Tensor] = field(default_factory=dict)
    buffers: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    grid_rows: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.uploader.device

    def prepare(self, need: AttentionNeed) -> None:
        """Make all that a layer's attention will ask for, so that it makes nothing while the model runs."""
        for bucket in self.buckets:
            self.mask(bucket, need.dtype, need.num_folded)
        for span in self.tiled_spans:
            for tile in span.tiles if not (span.square and need.is_fused) else ():
                self.band(tile, need.dtype)
        if need.pitches is not None:
            _ = self.visible_slots
            for bucket in self.buckets:
                self.picks(bucket)
            for pitch in need.pitches:
                self.visible_rows(pitch)

    def buffer(self, name: str, num_pages: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """Room for pages gathered from a view, [num_pages, *shape]. All layers and buckets share it.

        Memory fresh from the system costs more than the attention: every page of it faults.
        """
        key = (name, dtype, shape)
        if key not in self.buffers:
            self.buffers[key] = torch.empty((self.max_pages, *shape), dtype=dtype, device=self.device)
        return self.buffers[key][:num_pages]

    @cached_property
    def max_pages(self) -> int:
        """The most pages that are gathered at once."""
        gathered = [bucket.pages for bucket in self.buckets] + [span.pages for span in self.tiled_spans]
        return max(len(pages) for pages in gathered)

    @property
    def num_visible(self) -> int:
        """Tokens that `gather_tokens` returns."""
        return sum(self.visible_lengths)

    @cached_property
    def visible_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset of every visible token, span after span: [K], [K]."""
        tokens = [np.arange(v.first, v.span.end) for v in self.visibles]
        pages = [
            pages[at // self.block_tokens - v.first_block]
            for pages, at, v in zip(self.host_pages, tokens, self.visibles, strict=True)
        ]
        none = np.empty(0, dtype=np.int64)  # all may be padding
        sent = self.uploader.send(
            f"{self.name}.visible",
            pages=np.concatenate([none, *pages]),
            offsets=np.concatenate([none, *tokens]) % self.block_tokens,
        )
        return sent["pages"], sent["offsets"]

    def visible_rows(self, pitch: int) -> torch.Tensor:
        """Every visible token in a grid of tokens with so many from one page to the next: [K]."""
        if pitch not in self.grid_rows:
            pages, offsets = self.visible_slots
            room = self.uploader.room(f"{self.name}.grid{pitch}", pages.shape, torch.int64)
            self.grid_rows[pitch] = torch.add(offsets, pages, alpha=pitch, out=room)
        return self.grid_rows[pitch]

    def picks(self, bucket: Bucket) -> torch.Tensor | slice:
        """A bucket's slots as indices of the visible tokens. Padding repeats a token that its span does see."""
        if bucket.picks is None:
            starts = np.cumsum([0, *self.visible_lengths])[bucket.members]
            first = np.array([self.visibles[i].first for i in bucket.members])
            if bucket.cut is not None and len(bucket.members) == 1:
                bucket.picks = slice(starts[0], starts[0] + self.visible_lengths[bucket.members[0]])
            else:
                origins = np.array([self.visibles[i].first_block for i in bucket.members]) * self.block_tokens
                slots = (
                    np.arange(bucket.num_slots) if bucket.cut is None else np.arange(bucket.cut.start, bucket.cut.stop)
                )
                at = origins[:, None] + slots - first[:, None]
                lengths = np.array([self.visible_lengths[i] for i in bucket.members])
                picks = np.clip(at, 0, lengths[:, None] - 1) + starts[:, None]
                bucket.picks = self.uploader.send(f"{self.name}.picks{bucket.at}", picks=picks)["picks"]
        return bucket.picks

    def mask(self, bucket: Bucket, dtype: torch.dtype, num_folded: int) -> torch.Tensor | None:
        """What to add to a bucket's scores: [n, 1, folded * S, L], or [n, 1, 1, L] for one query."""
        key = (dtype, num_folded if bucket.num_queries > 1 else 1)
        if key not in bucket.masks:
            bucket.masks[key] = self._make_mask(bucket, *key)
        return bucket.masks[key]

    def _make_mask(self, bucket: Bucket, dtype: torch.dtype, num_folded: int) -> torch.Tensor | None:
        if bucket.cut is not None and bucket.num_queries == 1:
            return None
        slots = torch.arange(bucket.num_slots, device=self.device)
        if bucket.cut is not None:
            slots = slots[bucket.cut]
        hidden = (slots < bucket.first) | (slots > bucket.last)
        size, num_queries, num_keys = hidden.shape
        name = f"{self.name}.mask{bucket.at}.{num_folded}"
        mask = self.uploader.room(name, (size, num_folded, num_queries, num_keys), dtype).zero_()
        return mask.masked_fill_(hidden[:, None], float("-inf")).flatten(1, 2)[:, None]

    def band(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor | None:
        """What to add to a tile's scores: [queries, keys], or nothing where all see all.

        It depends on key minus query only: one matrix serves the tiles of all spans and steps, each takes its columns.
        """
        if tile.end - tile.start == 1:
            return None
        key = (dtype, tile)
        if key not in self.columns:
            columns = self._columns(tile, dtype)
            # GPU kernels read aligned rows: they need a copy. It is the one thing made in fresh memory. It may be as
            # large as the keys, and no captured step could use it again: where long spans begin changes every time.
            self.columns[key] = columns if self.device.type == "cpu" else columns.contiguous()
        return self.columns[key]

    def _columns(self, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
        num_queries, before = tile.end - tile.start, tile.start - tile.first
        band = self._band(num_queries, before, dtype)
        zero = band.shape[1] - band.shape[0]
        return band[:num_queries, zero - before : zero + num_queries]

    def _band(self, num_queries: int, before: int, dtype: torch.dtype) -> torch.Tensor:
        """[Q, B + Q] with Q >= num_queries and B >= before: kept from step to step until it has to grow."""
        key = ("band", self.sight, dtype)
        band = self.uploader.constants.get(key)
        rows, back = (0, 0) if band is None else (band.shape[0], band.shape[1] - band.shape[0])
        if band is None or rows < num_queries or back < before:
            band = self._make_band(_grown(rows, num_queries), _grown(back, before), dtype)
            self.uploader.constants[key] = band
        return band

    def _make_band(self, num_queries: int, before: int, dtype: torch.dtype) -> torch.Tensor:
        query = torch.arange(num_queries, device=self.device)[:, None]
        key = torch.arange(-before, num_queries, device=self.device)
        hidden = key > query
        if self.sight.window is not None:
            hidden |= key <= query - self.sight.window
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))


def _grown(size: int, needed: int) -> int:
    return max(size, 1 << max(needed - 1, 0).bit_length())
