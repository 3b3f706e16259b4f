"""Spans of more than one token cut into chunks, for scans.

Chunks lie step by step (the first chunk of every span, the second of every span that has one, ...), spans with most
chunks first: those still running at a step are then the first few, and their states a prefix of one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.longs import LongSpan, RowSegment
from hybridkv.kernels.pages import PageNumbers
from hybridkv.memory import Uploader

MIN_CHUNK_TOKENS = 8
CPU_BLOCK_BYTES = 2 << 20
DEVICE_BLOCK_BYTES = 256 << 20


def chunk_tokens(device: torch.device) -> int:
    """A good length of chunks: short ones save work, long ones save calls."""
    return 32 if device.type == "cpu" else 64


def block_bytes(device: torch.device) -> int:
    """The largest tensor to work on at once.

    On a CPU it should stay in the caches, and malloc should give it again without new page faults; elsewhere it is only
    kept from taking the memory of pages.
    """
    return CPU_BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES


class StateWrite(NamedTuple):
    """States that are complete after a round of a schedule."""

    which: Tensor | None
    """[w]: places among the states of the step; None: all of them."""
    dst: PageNumbers


class ScanRound(NamedTuple):
    """One chunk of every span that is still running: chunks first .. last, with the states of the first spans."""

    first: int
    last: int
    write: StateWrite | None

    @property
    def num_states(self) -> int:
        return self.last - self.first


@dataclass(slots=True)
class Schedule:
    """The longer spans cut into chunks."""

    chunk_tokens: int
    first_rows: list[int]
    """Of each chunk, on the host."""
    lengths: list[int]
    offsets: list[int]
    """Where the tokens of each chunk begin in `tokens`, and one more."""
    rounds: list[ScanRound]
    src: PageNumbers
    """[spans]: the states they begin with."""
    rows: Tensor
    """[chunks * chunk_tokens]: the token in each place; places left over repeat the chunk's last token."""
    mask: Tensor
    """[chunks, chunk_tokens]: whether there is a token in the place."""
    tokens: Tensor
    """[M]: the tokens in the packed row, chunk by chunk."""
    places: Tensor
    """[M]: where each of them is among the places."""

    def run_from(self, first: int, last: int) -> int | None:
        """The row where chunks first .. last begin, if they are one run of full chunks."""
        row, c = self.first_rows[first], self.chunk_tokens
        is_run = all(self.first_rows[i] == row + (i - first) * c and self.lengths[i] == c for i in range(first, last))
        return row if is_run else None

    def take(self, x: Tensor, first: int, last: int) -> Tensor:
        """The tokens of chunks first .. last. x: [N, ...] -> [chunks, chunk_tokens, ...], perhaps a view"""
        c = self.chunk_tokens
        row = self.run_from(first, last)
        if row is None:
            return x.index_select(0, self.rows[first * c : last * c]).unflatten(0, (last - first, c))
        return x[row : row + (last - first) * c].unflatten(0, (last - first, c))

    def put(self, y: Tensor, out: Tensor, first: int, last: int) -> None:
        """The same way back. y: [chunks, chunk_tokens, ...], out: [N, ...]"""
        c = self.chunk_tokens
        row = self.run_from(first, last)
        if row is not None:
            out[row : row + (last - first) * c].unflatten(0, (last - first, c)).copy_(y)
        elif last - first == 1:
            row, length = self.first_rows[first], self.lengths[first]
            out[row : row + length].copy_(y[0, :length])
        else:
            here = slice(self.offsets[first], self.offsets[last])
            kept = y.flatten(0, 1).index_select(0, self.places[here] - first * c)
            out.index_copy_(0, self.tokens[here], kept.to(out.dtype))

    def blocks(self, chunk_bytes: int) -> list[list[ScanRound]]:
        """The steps in runs to be worked on together, where the largest tensor of a chunk takes `chunk_bytes`."""
        max_chunks = block_bytes(self.rows.device) // chunk_bytes
        runs: list[list[ScanRound]] = []
        for scan_round in self.rounds:
            if runs and scan_round.last - runs[-1][0].first <= max_chunks:
                runs[-1].append(scan_round)
            else:
                runs.append([scan_round])
        return runs


def write_states(state: Tensor, states: Tensor, step: ScanRound) -> None:
    """States that are complete after a step go to their pages. state: [spans, ...], states: [pages, ...]"""
    if step.write is not None:
        which, dst = step.write
        done = state[: step.num_states] if which is None else state.index_select(0, which)
        dst.write(done, states)


class _Chunk(NamedTuple):
    """A chunk of one segment."""

    row: int
    length: int
    dst: int | None
    """The page that its state goes to, if its segment ends here."""


class _End(NamedTuple):
    """A state that is complete: its place among those of the step, and its page."""

    place: int
    dst: int


def make_schedule(longs: list[LongSpan], chunk_tokens: int, uploader: Uploader, name: str) -> Schedule:
    longest = max(segment.length for long in longs for segment in long.segments)
    c = min(chunk_tokens, max(MIN_CHUNK_TOKENS, 1 << (longest - 1).bit_length()))
    chunks = [[chunk for segment in long.segments for chunk in _cut(segment, c)] for long in longs]
    order = sorted(range(len(longs)), key=lambda i: -len(chunks[i]))
    by_step = [[chunks[i][depth] for i in order if depth < len(chunks[i])] for depth in range(len(chunks[order[0]]))]
    ends = [[_End(at, chunk.dst) for at, chunk in enumerate(now) if chunk.dst is not None] for now in by_step]
    first_rows = [chunk.row for now in by_step for chunk in now]
    lengths = [chunk.length for now in by_step for chunk in now]
    inside = np.minimum(np.arange(c)[None], np.array(lengths)[:, None] - 1)
    rows = np.array(first_rows)[:, None] + inside
    mask = np.arange(c)[None] < np.array(lengths)[:, None]
    src = [longs[i].segments[0].src for i in order]
    sent = uploader.send(
        name,
        src=src,
        rows=rows,
        mask=mask,
        tokens=rows[mask],
        places=np.flatnonzero(mask),
        which=[end.place for here in ends for end in here],
        dst=[end.dst for here in ends for end in here],
    )
    return Schedule(
        chunk_tokens=c,
        first_rows=first_rows,
        lengths=lengths,
        offsets=[0, *np.cumsum(lengths).tolist()],
        rounds=_make_rounds([len(now) for now in by_step], ends, sent["which"], sent["dst"]),
        src=PageNumbers(sent["src"], src),
        rows=sent["rows"],
        mask=uploader.flags(f"{name}.mask", sent["mask"]).view(-1, c),
        tokens=sent["tokens"],
        places=sent["places"],
    )


def _cut(segment: RowSegment, chunk_tokens: int) -> list[_Chunk]:
    starts = range(segment.row, segment.end, chunk_tokens)
    return [_Chunk(at, min(chunk_tokens, segment.end - at), segment.dst if at == starts[-1] else None) for at in starts]


def _make_rounds(counts: list[int], ends: list[list[_End]], which: Tensor, dst: Tensor) -> list[ScanRound]:
    """counts: chunks of each step; which, dst: the places and pages of the ends of all steps, on the device"""
    made: list[ScanRound] = []
    first = begin = 0
    for count, now in zip(counts, ends, strict=True):
        here = slice(begin, begin + len(now))
        pages = PageNumbers(dst[here], [end.dst for end in now])
        write = StateWrite(None if len(now) == count else which[here], pages) if now else None
        made.append(ScanRound(first, first + count, write))
        first, begin = first + count, here.stop
    return made
