"""Runs decoding steps: one token a row, each step one CUDA graph, captured for a few numbers of rows at the start.

What is captured is the stock model on the buffers of `StepBuffer`. A step of 33 rows runs the graph of 48, with 15
rows of padding. Where there is no GPU the same step runs without a graph: that is how tests compare it.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils.logging import tqdm

from hybridkv.engine.decoding.step_buffer import Moved, Row, RowViews, StepBuffer
from hybridkv.engine.sampling.device_draw import PlainParams, draw_plain

LOG = logging.getLogger("hybridkv.engine")

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows that a graph is captured for. Larger steps run as any other step."""

_WARM_UPS = 2
"""Runs before a capture: the first compiles kernels, the second finds them."""

Forward = Callable[[RowViews], Tensor]
"""Runs the model on the rows in the buffer: logits `[B, vocab]`."""


class DrawnTokens:
    """The tokens that a step has drawn, on their way to the host."""

    def __init__(self, most: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(most, dtype=torch.int64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._count = 0

    def take(self, tokens: Tensor) -> DrawnTokens:
        """Copy them when the device has drawn them. It may go on to the next step then."""
        self._count = len(tokens)
        self._host[: self._count].copy_(tokens, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        return self

    def tolist(self) -> list[int]:
        """Wait for the tokens."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: list[int] = self._host[: self._count].tolist()
        return tokens


class Decoded(NamedTuple):
    """What a step computes, on the device; it may still be running."""

    logits: Tensor
    """[rows, vocab]. Valid until the next step."""
    tokens: DrawnTokens
    """By row: drawn as each row's `draw` says; -1 if the logits are unusable. Valid until the step after the next."""


class _Kind(NamedTuple):
    """Which parts of sampling a step needs."""

    drawn: bool
    filtered: bool

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Kind:
        drawn = [row.draw for row in rows if row.draw.temperature > 0]
        return cls(bool(drawn), any(draw.top_k > 0 or draw.top_p < 1 for draw in drawn))


_KINDS = (_Kind(False, False), _Kind(True, False), _Kind(True, True))


class Decoder:
    """Decoding steps of one model on one arena."""

    def __init__(self, forward: Forward, buffer: StepBuffer, *, max_rows: int) -> None:
        self._forward = forward
        self._buffer = buffer
        self.sizes = [size for size in SIZES if size < max_rows] + [min(max_rows, SIZES[-1])]
        self._models: dict[int, torch.cuda.CUDAGraph] = {}
        self._draws: dict[tuple[int, _Kind], torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None
        self._tokens = torch.zeros(self.sizes[-1], dtype=torch.int64, device=buffer.device)
        self._num_rows, self._kind, self._turn = 0, _KINDS[0], 0
        self._drawn = [DrawnTokens(self.sizes[-1], buffer.device) for _ in range(2)]
        self.graph_bytes = 0
        """Memory that the graphs hold, besides weights and arena."""

    def takes(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a step can run here. `num_tokens`: of the longest row."""
        return 0 < num_rows <= self.sizes[-1] and self._buffer.fits(num_tokens, self._size(num_rows))

    def start(self, rows: Sequence[Row]) -> Decoded:
        """Submit a step to the device."""
        self._num_rows, self._kind = len(rows), _Kind.of(rows)
        self._buffer.fill(rows, self._size(len(rows)))
        return self._submit()

    def can_follow(self, num_rows: int, num_tokens: int) -> bool:
        """Whether `follow` is the best way to run the next step. `num_rows`: rows that are left."""
        size = self._buffer.size
        return num_rows > 0 and self._size(num_rows) == size and self._buffer.fits(num_tokens, size)

    def follow(self, moved: Moved, tokens: Sequence[int], changed: Mapping[int, Row | None]) -> Decoded:
        """Submit the step after the last one: see `StepBuffer.follow`. Rows keep their places."""
        self._buffer.follow(moved, tokens, changed)
        return self._submit()

    def advance(self, moved: Moved) -> Decoded:
        """Submit the step after the last one before its tokens are known: see `StepBuffer.advance`."""
        self._buffer.advance(moved, self._tokens)
        return self._submit()

    def retire(self, rows: Sequence[int]) -> None:
        """Note that rows have ended on the device: see `StepBuffer.advance`."""
        self._buffer.retire(rows)

    def _submit(self) -> Decoded:
        size = self._buffer.size
        if self._models:
            self._models[size].replay()
            self._draws[size, self._kind].replay()
        else:
            self._run(size)
            self._draw(size, self._kind)
        assert self._logits is not None
        self._turn = 1 - self._turn
        return Decoded(self._logits[: self._num_rows], self._drawn[self._turn].take(self._tokens[: self._num_rows]))

    def capture(self) -> None:
        """Capture the graphs, largest first: the smaller ones then use the same memory."""
        begin, before = time.perf_counter(), torch.cuda.memory_reserved()
        pool = torch.cuda.graph_pool_handle()
        try:
            with _no_collection():
                for size in tqdm(self.sizes[::-1], desc="Capturing decoding steps", leave=False):
                    self._buffer.pad(size)
                    self._models[size] = _captured(partial(self._run, size), pool)
                    self._buffer.advance(Moved([], None, {}), self._tokens)  # compiles it
                    for kind in _KINDS:
                        self._draws[size, kind] = _captured(partial(self._draw, size, kind), pool)
        except BaseException:
            self._models, self._draws = {}, {}
            raise
        torch.cuda.synchronize()
        self.graph_bytes = torch.cuda.memory_reserved() - before
        LOG.info(
            "captured decoding steps of up to %d requests as %d CUDA graphs in %.1f s: %d MiB of GPU memory",
            self.sizes[-1],
            len(self.sizes),
            time.perf_counter() - begin,
            self.graph_bytes >> 20,
        )

    def _size(self, num_rows: int) -> int:
        return next(size for size in self.sizes if size >= num_rows)

    def _run(self, size: int) -> None:
        logits = self._forward(self._buffer.views(size))
        if self._logits is None:  # the first run is the largest, or there are no graphs
            with torch.inference_mode(False):
                self._logits = torch.zeros((self.sizes[-1], logits.shape[-1]), dtype=logits.dtype, device=logits.device)
        self._logits[:size].copy_(logits)

    def _draw(self, size: int, kind: _Kind) -> None:
        assert self._logits is not None
        params = PlainParams(**self._buffer.views(size).draws)
        tokens = draw_plain(self._logits[:size], params, filtered=kind.filtered, drawn=kind.drawn)
        self._tokens[:size].copy_(tokens)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from freeing graphs of engines that have ended: CUDA ends a capture during which one is destroyed."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _captured(run: Callable[[], None], pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph
