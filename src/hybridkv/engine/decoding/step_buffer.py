"""All numbers of a decoding step in one buffer: filled on the host, copied once, read by kernels at fixed addresses.

The buffer has one layout for each number of rows. Its page tables come last, since their width changes from step to
step: kernels read the width from the buffer. A step that follows another changes few of these numbers, and page tables
travel only if one has changed.

    | tokens | positions | ... | src, dst of each state | width, origin of each group | page tables of each group |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridkv.cache import CacheLayout, StepTables
from hybridkv.engine.sampling.device_draw import GREEDY, Draw
from hybridkv.engine.tables import StateKey, Tables
from hybridkv.kernels.decode.tables import DecodeStates, DecodeTokens
from hybridkv.kernels.spans import PADDED

_ALIGN_BYTES = 64
_MOST_TABLE_BYTES = 64 << 20
"""Room for page tables. Steps with more, of many long requests, run as any other step."""
_WIDTH_STEP = 16
"""Page tables grow by so many blocks at a time: seldom."""

Fields = Mapping[str, npt.NDArray[Any]]
"""The fields of a step on the host, by name."""


class Row(NamedTuple):
    """One sample's part of a decoding step."""

    token: int
    tables: StepTables
    draw: Draw = GREEDY


class Moved(NamedTuple):
    """The samples of a step that go on to the next one, each in its row."""

    rows: list[int]
    tokens: list[int]
    """The token that each draws, and computes next."""
    seeds: npt.NDArray[np.uint64] | None
    """Of the next draws. None if all are greedy."""


class _Field(NamedTuple):
    start: int
    """In bytes."""
    dtype: torch.dtype
    length: int


_LONG = ("tokens", "positions", "shifts", "seed")
_INTS = ("places", "top_k")
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
            self._device = torch.zeros(self.nbytes, dtype=torch.uint8, device=device) if on_gpu else self._host
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
        tables = self._page_tables(fields)
        for index, row in enumerate(rows):
            self._put(fields, tables, index, row)
        self._put_padding(fields, slice(len(rows), size))
        self._copy(with_tables=True)

    def follow(self, moved: Moved, changed: Mapping[int, Row | None] = MappingProxyType({})) -> None:
        """Write the step after the last one and copy it: each row one token on, in the same pages, states in place.

        `moved` has all rows of the last step. `changed`: those that go on in other pages, and those that do not go on:
        they are padding from now on.
        """
        self._wait()
        fields, rows = self._host_fields(self.size), moved.rows
        fields["tokens"][rows] = moved.tokens
        for name in ("positions", "shifts", "places"):
            fields[name][rows] += 1
        for number in range(len(self._states)):
            fields[f"src{number}"][rows] = fields[f"dst{number}"][rows]
        if moved.seeds is not None:
            fields["seed"][rows] = moved.seeds
        new = {index: row for index, row in changed.items() if row is not None}
        width = self._width_for(max((row.tables.end for row in new.values()), default=0))
        if width > self._width:
            before = [table.copy() for table in self._page_tables(fields)]
            self._set_width(fields, width)
            for table, pages in zip(self._page_tables(fields), before, strict=True):
                table[:, : pages.shape[1]] = pages
        tables = self._page_tables(fields)
        for index, row in new.items():
            self._put(fields, tables, index, row)
        for index in changed.keys() - new.keys():
            self._put_padding(fields, slice(index, index + 1))
        self._copy(with_tables=bool(new))

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

    def _put(self, fields: Fields, tables: Sequence[npt.NDArray[np.int32]], index: int, row: Row) -> None:
        position, draw = row.tables.start, row.draw
        fields["tokens"][index] = row.token
        fields["positions"][index] = fields["places"][index] = position
        fields["shifts"][index] = position - index
        fields["temperature"][index], fields["top_k"][index] = draw.temperature, draw.top_k
        fields["top_p"][index], fields["seed"][index] = draw.top_p, draw.seed
        for number, key in enumerate(self._states):
            segment = row.tables.segments[key.group][0]
            fields[f"src{number}"][index] = segment.src[key.page]
            fields[f"dst{number}"][index] = segment.dst[key.page]
        for group, table in zip(self._groups, tables, strict=True):
            pages = np.frombuffer(row.tables.tables[group.name], dtype=np.intc)[: self._width]
            table[index, : len(pages)] = pages

    def _put_padding(self, fields: Fields, rows: slice) -> None:
        for name in _LONG + _INTS + _FLOATS:
            fields[name][rows] = 0
        fields["places"][rows] = PADDED
        fields["top_p"][rows] = 1
        for number in range(len(self._states)):
            fields[f"src{number}"][rows] = fields[f"dst{number}"][rows] = PADDED

    def _set_width(self, fields: Fields, width: int) -> None:
        self._width = width
        for number in range(len(self._groups)):
            fields[f"shape{number}"][:] = width, number * self.size * width

    def _page_tables(self, fields: Fields) -> list[npt.NDArray[np.int32]]:
        """The page table of each group: [size, width]"""
        entries = self.size * self._width
        return [
            fields["tables"][number * entries : (number + 1) * entries].reshape(self.size, self._width)
            for number in range(len(self._groups))
        ]

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the last step still reads this memory

    def _copy(self, *, with_tables: bool) -> None:
        if self._copied is None:
            return
        nbytes = self._layout(self.size)["tables"].start
        if with_tables:
            nbytes += 4 * len(self._groups) * self.size * self._width
        self._device[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
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
        kinds += [
            (f"{end}{number}", torch.int32, size) for number in range(len(self._states)) for end in ("src", "dst")
        ]
        kinds += [(f"shape{number}", torch.int32, 2) for number in range(len(self._groups))]
        start = 0
        for name, dtype, count in kinds:
            fields[name] = _Field(start, dtype, count)
            start += -(-count * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        fields["tables"] = _Field(start, torch.int32, 0)  # all that is left
        return fields

    def _host_fields(self, size: int) -> Fields:
        if size not in self._on_host:
            kinds = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
            fields: dict[str, npt.NDArray[Any]] = {
                name: self._numpy[slice(*self._bounds(field))].view(kinds[field.dtype])
                for name, field in self._layout(size).items()
            }
            fields["seed"] = fields["seed"].view(np.uint64)
            self._on_host[size] = fields
        return self._on_host[size]

    def _bounds(self, field: _Field) -> tuple[int, int]:
        rest = (self.nbytes - field.start) // field.dtype.itemsize
        return field.start, field.start + (field.length or rest) * field.dtype.itemsize

    def _make_views(self, size: int) -> RowViews:
        with torch.inference_mode(False):
            on = {name: self._device[slice(*self._bounds(f))].view(f.dtype) for name, f in self._layout(size).items()}
        tokens = {
            group.name: DecodeTokens(on["places"], on["tables"], on[f"shape{number}"], self.block_tokens, group.sight)
            for number, group in enumerate(self._groups)
        }
        states = {key: DecodeStates(on[f"src{number}"], on[f"dst{number}"]) for number, key in enumerate(self._states)}
        draws = {name: on[name] for name in ("temperature", "top_k", "top_p", "seed")}
        return RowViews(on["tokens"], on["positions"], on["shifts"], Tables(tokens, states), draws)
