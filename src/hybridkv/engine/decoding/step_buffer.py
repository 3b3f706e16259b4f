"""All numbers of a decoding step in one buffer: filled on the host, copied once, read by kernels at fixed addresses.

The buffer has one layout for each number of rows. Its page tables come last, since their width changes from step to
step: kernels read the width from the buffer.

    | tokens | positions | ... | src, dst of each state | next seeds | width, origin of each group | page tables |
    └─────────────────────── head ──────────────────────┴────────────────────────── tail ────────────────────────┘

A step that follows another changes few of these numbers. If the host knows the tokens, it writes and copies the head
(`follow`). If it does not yet, the device changes the head itself (`advance`), and the host does the same to its copy.
The tail travels only if something in it has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridkv.cache import CacheLayout, StepTables
from hybridkv.engine.sampling.device_draw import GREEDY, Draw
from hybridkv.engine.tables import StateKey, Tables
from hybridkv.kernels.decode.tables import DecodeStates, DecodeTokens, StepNumbers
from hybridkv.kernels.spans import PADDED

_ALIGN_BYTES = 64
_MOST_TABLE_BYTES = 64 << 20
"""Room for page tables. Steps with more, of many long requests, run as any other step."""
_WIDTH_STEP = 16
"""Page tables grow by so many blocks at a time: seldom."""

Fields = Mapping[str, npt.NDArray[Any]]
"""The fields of a step on the host, by name."""

MAX_ENDS = 8
"""Tokens that the device knows to end a row, at most."""


class Row(NamedTuple):
    """One sample's part of a decoding step."""

    token: int
    tables: StepTables
    draw: Draw = GREEDY
    ends: Collection[int] = ()
    """Tokens that end it. The device knows `MAX_ENDS` of them."""
    left: int = 0
    """Steps that may follow, as far as the device goes on by itself."""


class Moved(NamedTuple):
    """The samples of a step that go on to the next one, each in its row."""

    rows: Sequence[int]
    seeds: npt.NDArray[np.uint64] | None
    """The seeds of the next draws, in the order of `rows`. None if all are greedy."""
    tables: Mapping[int, StepTables]
    """By row: page tables that the device lacks: they have a block more, or other pages of the same content."""


class _Field(NamedTuple):
    start: int
    """In bytes."""
    dtype: torch.dtype
    length: int


_REST = -1
"""The length of the field that takes all that is left."""


_LONG = ("tokens", "positions", "shifts", "seed")
_INTS = ("places", "left", "top_k")
_FLOATS = ("temperature", "top_p")


class RowViews(NamedTuple):
    """The fields of a step of B rows, on the device. Each is `[B]`."""

    tokens: Tensor
    positions: Tensor
    """int64, for the model. 0 for padding."""
    shifts: Tensor
    """Position minus index of the row."""
    tables: Tables
    draws: Mapping[str, Tensor]
    """"temperature", "top_k", "top_p", "seed"."""
    numbers: StepNumbers


class StepBuffer:
    """The buffer of one engine, for steps of at most `max_rows` rows, each with at most `max_tokens` tokens."""

    def __init__(
        self, layout: CacheLayout, states: Iterable[StateKey], device: torch.device, *, max_rows: int, max_tokens: int
    ) -> None:
        self.device = device
        self.block_tokens = layout.block_tokens
        self._groups = layout.token_groups
        self._states = list(states)
        self._layouts: dict[int, dict[str, _Field]] = {}
        self._most_blocks = -(-max_tokens // layout.block_tokens)
        table_bytes = min(4 * max_rows * self._most_blocks * len(self._groups), _MOST_TABLE_BYTES)
        self.nbytes = self._layout(max_rows)["tables"].start + max(table_bytes, _ALIGN_BYTES)
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self._host = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=on_gpu)
            self._device = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        self._numpy = self._host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        self._on_host: dict[int, Fields] = {}
        self._on_device: dict[int, RowViews] = {}
        self.size = self._width = 0
        """Rows of the last step, with padding, and the blocks of its page tables."""

    def fits(self, num_tokens: int, size: int) -> bool:
        """Whether the page tables of a step of `size` rows fit, if the longest has `num_tokens` tokens."""
        entries = len(self._groups) * size * self._width_for(num_tokens)
        return self._layout(size)["tables"].start + 4 * entries <= self.nbytes

    def fill(self, rows: Sequence[Row], size: int) -> None:
        """Write a step of `size` rows, the last of them padding, and copy it to the device."""
        self._wait()
        self.size = size
        fields = self._host_fields(size)
        self._set_width(fields, self._width_for(max((row.tables.end for row in rows), default=0)))
        for index, row in enumerate(rows):
            self._put(fields, index, row)
        self._put_padding(fields, slice(len(rows), size))
        self._copy(0, self._end())

    def follow(self, moved: Moved, tokens: Sequence[int], changed: Mapping[int, Row | None]) -> None:
        """Write the step after the last one and copy it: each row one token on, in the same pages, states in place.

        `moved` has all rows of the last step, `tokens` what they have drawn. `changed`: rows that go on in other pages,
        and rows that do not go on: they are padding from now on.
        """
        self._wait()
        fields = self._host_fields(self.size)
        self._move(fields, moved)
        fields["tokens"][moved.rows] = tokens
        if moved.seeds is not None:
            fields["seed"][moved.rows] = moved.seeds
        new = {index: row for index, row in changed.items() if row is not None}
        self._widen(fields, max((row.tables.end for row in new.values()), default=0))
        for index, row in new.items():
            self._put(fields, index, row)
        self._put_padding(fields, [index for index, row in changed.items() if row is None])
        self._copy(0, self._end() if new or moved.tables else self._layout(self.size)["next_seed"].start)

    def advance(self, moved: Moved, drawn: Tensor) -> None:
        """Let the device write the step after the last one, from the tokens that it has `drawn`.

        Rows that have ended become padding there. The host calls `retire` when it knows them.
        """
        from hybridkv.kernels.decode.advance import advance

        self._wait()
        fields = self._host_fields(self.size)
        self._move(fields, moved)
        if moved.seeds is not None:
            fields["next_seed"][moved.rows] = moved.seeds
        first, tables = self._layout(self.size)["next_seed"].start, self._layout(self.size)["tables"].start
        if moved.tables:
            self._copy(first, self._end())
        elif moved.seeds is not None:
            self._copy(first, tables)
        advance(self.views(self.size).numbers, drawn[: self.size])

    def retire(self, rows: Sequence[int]) -> None:
        """Note that rows are padding on the device."""
        if rows:
            self._wait()
            self._put_padding(self._host_fields(self.size), list(rows))

    def pad(self, size: int) -> None:
        """Write a step that is all padding: it reads and writes no page."""
        self.fill([], size)

    def views(self, size: int) -> RowViews:
        """The fields of steps of `size` rows on the device."""
        if size not in self._on_device:
            self._on_device[size] = self._make_views(size)
        return self._on_device[size]

    # --- filling ------------------------------------------------------------------------------------------------------

    def _width_for(self, num_tokens: int) -> int:
        """Blocks of a row of so many tokens, and some to grow into."""
        most = min(self._most_blocks, -(-num_tokens // self.block_tokens // _WIDTH_STEP) * _WIDTH_STEP)
        return max(most, -(-num_tokens // self.block_tokens))

    def _move(self, fields: Fields, moved: Moved) -> None:
        """One token on, in the same pages."""
        rows = moved.rows
        for name in ("positions", "shifts", "places"):
            fields[name][rows] += 1
        fields["left"][rows] -= 1
        fields["src"][:, rows] = fields["dst"][:, rows]
        if moved.tables:
            self._widen(fields, max(tables.end for tables in moved.tables.values()))
            for index, tables in moved.tables.items():
                self._put_tables(fields, index, tables)

    def _put(self, fields: Fields, index: int, row: Row) -> None:
        position, draw = row.tables.start, row.draw
        fields["tokens"][index] = row.token
        fields["positions"][index] = fields["places"][index] = position
        fields["shifts"][index] = position - index
        fields["left"][index] = row.left
        fields["ends"][index] = PADDED
        fields["ends"][index, : len(row.ends)] = list(row.ends)[:MAX_ENDS]
        fields["temperature"][index], fields["top_k"][index] = draw.temperature, draw.top_k
        fields["top_p"][index], fields["seed"][index] = draw.top_p, draw.seed
        for number, key in enumerate(self._states):
            segment = row.tables.segments[key.group][0]
            fields["src"][number, index] = segment.src[key.page]
            fields["dst"][number, index] = segment.dst[key.page]
        self._put_tables(fields, index, row.tables)

    def _put_tables(self, fields: Fields, index: int, tables: StepTables) -> None:
        for group, table in zip(self._groups, self._page_tables(fields), strict=True):
            pages = np.frombuffer(tables.tables[group.name], dtype=np.intc)[: self._width]
            table[index, : len(pages)] = pages

    def _put_padding(self, fields: Fields, rows: slice | list[int]) -> None:
        for name in _LONG + _INTS + _FLOATS:
            fields[name][rows] = 0
        fields["places"][rows] = PADDED
        fields["top_p"][rows] = 1
        fields["src"][:, rows] = fields["dst"][:, rows] = PADDED

    def _set_width(self, fields: Fields, width: int) -> None:
        self._width = width
        for number in range(len(self._groups)):
            fields[f"shape{number}"][:] = width, number * self.size * width

    def _widen(self, fields: Fields, num_tokens: int) -> None:
        """Make the page tables wide enough for a row of so many tokens."""
        if self._width_for(num_tokens) <= self._width:
            return
        before = [table.copy() for table in self._page_tables(fields)]
        self._set_width(fields, self._width_for(num_tokens))
        for table, pages in zip(self._page_tables(fields), before, strict=True):
            table[:, : pages.shape[1]] = pages

    def _page_tables(self, fields: Fields) -> list[npt.NDArray[np.int32]]:
        """The page table of each group: [size, width]"""
        entries = self.size * self._width
        return [
            fields["tables"][number * entries : (number + 1) * entries].reshape(self.size, self._width)
            for number in range(len(self._groups))
        ]

    def _end(self) -> int:
        """Where the page tables end, in bytes."""
        return self._layout(self.size)["tables"].start + 4 * len(self._groups) * self.size * self._width

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the last step still reads this memory

    def _copy(self, first: int, end: int) -> None:
        """Copy a range of bytes to the device."""
        self._device[first:end].copy_(self._host[first:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    # --- layout -------------------------------------------------------------------------------------------------------

    def _layout(self, size: int) -> dict[str, _Field]:
        if size not in self._layouts:
            self._layouts[size] = self._make_layout(size)
        return self._layouts[size]

    def _make_layout(self, size: int) -> dict[str, _Field]:
        fields: dict[str, _Field] = {}
        kinds = [(name, torch.int64, size) for name in _LONG]
        kinds += [(name, torch.int32, size) for name in _INTS]
        kinds += [(name, torch.float32, size) for name in _FLOATS]
        kinds += [("ends", torch.int32, MAX_ENDS * size)]
        kinds += [(name, torch.int32, len(self._states) * _state_stride(size)) for name in ("src", "dst")]
        kinds += [("next_seed", torch.int64, size)]
        kinds += [(f"shape{number}", torch.int32, 2) for number in range(len(self._groups))]
        start = 0
        for name, dtype, count in kinds:
            fields[name] = _Field(start, dtype, count)
            start += -(-count * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        fields["tables"] = _Field(start, torch.int32, _REST)
        return fields

    def _host_fields(self, size: int) -> Fields:
        if size not in self._on_host:
            kinds = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
            fields: dict[str, npt.NDArray[Any]] = {
                name: self._numpy[slice(*self._bounds(field))].view(kinds[field.dtype])
                for name, field in self._layout(size).items()
            }
            for name in ("seed", "next_seed"):
                fields[name] = fields[name].view(np.uint64)
            for name in ("src", "dst"):
                fields[name] = fields[name].reshape(len(self._states), _state_stride(size))[:, :size]
            fields["ends"] = fields["ends"].reshape(size, MAX_ENDS)
            self._on_host[size] = fields
        return self._on_host[size]

    def _bounds(self, field: _Field) -> tuple[int, int]:
        rest = (self.nbytes - field.start) // field.dtype.itemsize
        length = rest if field.length == _REST else field.length
        return field.start, field.start + length * field.dtype.itemsize

    def _make_views(self, size: int) -> RowViews:
        with torch.inference_mode(False):
            on = {name: self._device[slice(*self._bounds(f))].view(f.dtype) for name, f in self._layout(size).items()}
            src, dst = (on[name].view(len(self._states), _state_stride(size))[:, :size] for name in ("src", "dst"))
            ends = on["ends"].view(size, MAX_ENDS)
        tokens = {
            group.name: DecodeTokens(on["places"], on["tables"], on[f"shape{number}"], self.block_tokens, group.sight)
            for number, group in enumerate(self._groups)
        }
        states = {key: DecodeStates(src[number], dst[number]) for number, key in enumerate(self._states)}
        draws = {name: on[name] for name in ("temperature", "top_k", "top_p", "seed")}
        own = {name: on[name] for name in ("tokens", "positions", "shifts", "places", "left")}
        numbers = StepNumbers(**own, seeds=on["seed"], next_seeds=on["next_seed"], ends=ends, src=src, dst=dst)
        return RowViews(on["tokens"], on["positions"], on["shifts"], Tables(tokens, states), draws, numbers)


def _state_stride(size: int) -> int:
    """Pages of one state of all rows, so that each state's first one is aligned."""
    return -(-4 * size // _ALIGN_BYTES) * _ALIGN_BYTES // 4
