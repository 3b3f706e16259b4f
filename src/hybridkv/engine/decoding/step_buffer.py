"""All numbers of a decoding step in one buffer: filled on the host, copied once, read by kernels at fixed addresses.

The buffer has one layout for each number of rows. Its page tables come last, since their width changes from step to
step: kernels read the width from the buffer.

    | tokens | positions | ... | src, dst of each state | width, origin of each group | page tables of each group |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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


class Row(NamedTuple):
    """One sample's part of a decoding step."""

    token: int
    tables: StepTables
    draw: Draw = GREEDY


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
        most_blocks = -(-max_tokens // layout.block_tokens)
        table_bytes = min(4 * max_rows * most_blocks * len(self._groups), _MOST_TABLE_BYTES)
        self.nbytes = self._layout(max_rows)["tables"].start + max(table_bytes, _ALIGN_BYTES)
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self._host = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=on_gpu)
            self._device = torch.zeros(self.nbytes, dtype=torch.uint8, device=device) if on_gpu else self._host
        self._numpy = self._host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        self._on_host: dict[int, dict[str, npt.NDArray[np.generic]]] = {}
        self._on_device: dict[int, RowViews] = {}

    def fits(self, num_tokens: int, size: int) -> bool:
        """Whether the page tables of a step of `size` rows fit, if the longest has `num_tokens` tokens."""
        entries = len(self._groups) * size * -(-num_tokens // self.block_tokens)
        return self._layout(size)["tables"].start + 4 * entries <= self.nbytes

    def fill(self, rows: Sequence[Row], size: int) -> None:
        """Write a step of `size` rows, the last of them padding, and copy it to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the last step still reads this memory
        fields, count = self._host_fields(size), len(rows)
        positions = np.fromiter((row.tables.start for row in rows), np.int64, count)
        fields["tokens"][:count] = np.fromiter((row.token for row in rows), np.int64, count)
        fields["positions"][:count] = positions
        fields["shifts"][:count] = positions - np.arange(count)
        fields["places"][:count] = positions
        for name in ("tokens", "positions", "shifts"):
            fields[name][count:] = 0
        fields["places"][count:] = PADDED
        self._fill_draws(fields, rows)
        self._fill_states(fields, rows)
        width = self._fill_tables(fields, rows, size)
        self._copy(self._layout(size)["tables"].start + 4 * len(self._groups) * size * width)

    def pad(self, size: int) -> None:
        """Write a step that is all padding: it reads and writes no page."""
        self.fill([], size)

    def views(self, size: int) -> RowViews:
        """The fields of steps of `size` rows on the device."""
        if size not in self._on_device:
            self._on_device[size] = self._make_views(size)
        return self._on_device[size]

    # --- filling ------------------------------------------------------------------------------------------------------

    def _width(self, rows: Sequence[Row]) -> int:
        """Blocks of the longest row."""
        return -(-max((row.tables.end for row in rows), default=0) // self.block_tokens)

    def _fill_draws(self, fields: Mapping[str, npt.NDArray[np.generic]], rows: Sequence[Row]) -> None:
        count = len(rows)
        draws = [row.draw for row in rows]
        fields["temperature"][:count] = [draw.temperature for draw in draws]
        fields["top_k"][:count] = [draw.top_k for draw in draws]
        fields["top_p"][:count] = [draw.top_p for draw in draws]
        seeds = np.fromiter((draw.seed for draw in draws), np.uint64, count)
        fields["seed"][:count] = seeds.view(np.int64)
        fields["temperature"][count:], fields["top_k"][count:], fields["top_p"][count:] = 0, 0, 1

    def _fill_states(self, fields: Mapping[str, npt.NDArray[np.generic]], rows: Sequence[Row]) -> None:
        for number, key in enumerate(self._states):
            src, dst = fields[f"src{number}"], fields[f"dst{number}"]
            segments = [row.tables.segments[key.group][0] for row in rows]
            src[: len(rows)] = [segment.src[key.page] for segment in segments]
            dst[: len(rows)] = [segment.dst[key.page] for segment in segments]
            src[len(rows) :] = dst[len(rows) :] = PADDED

    def _fill_tables(self, fields: Mapping[str, npt.NDArray[np.generic]], rows: Sequence[Row], size: int) -> int:
        width = self._width(rows)
        entries = size * width
        for number, group in enumerate(self._groups):
            fields[f"shape{number}"][:] = width, number * entries
            table = fields["tables"][number * entries : (number + 1) * entries].reshape(size, width)
            for row, place in zip(rows, table, strict=False):
                pages = row.tables.tables[group.name]
                num_blocks = min(len(pages), width)
                place[:num_blocks] = np.frombuffer(pages, dtype=np.intc)[:num_blocks]
        return width

    def _copy(self, nbytes: int) -> None:
        if self._copied is not None:
            self._device[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
            self._copied.record()

    # --- layout -------------------------------------------------------------------------------------------------------

    def _layout(self, size: int) -> dict[str, _Field]:
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

    def _host_fields(self, size: int) -> dict[str, npt.NDArray[np.generic]]:
        if size not in self._on_host:
            kinds = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
            self._on_host[size] = {
                name: self._numpy[slice(*self._bounds(field))].view(kinds[field.dtype])
                for name, field in self._layout(size).items()
            }
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
