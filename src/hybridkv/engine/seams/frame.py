"""Context of one packed step in a model: data that the seams need and the model's signatures do not pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hybridkv.engine.tables import StateKey, Tables
from hybridkv.errors import HybridKVError
from hybridkv.kernels.decode.tables import DecodeStates, DecodeTokens
from hybridkv.kernels.segments import SegmentTable
from hybridkv.kernels.tokens import TokenTable
from hybridkv.memory import LayerMemory, Memory


class AdapterRows(NamedTuple):
    """The tokens of a step that one adapter computes."""

    name: str
    own: torch.Tensor
    """Their rows in the packed step."""
    seen: torch.Tensor
    """Rows of all tokens that its requests see, in a layer that is given those of all requests one after another."""


class StepAdapters(NamedTuple):
    """The adapters of a step."""

    rows: Sequence[AdapterRows]
    num_tokens: int
    """Rows of the packed step, those without an adapter included."""
    num_seen: int
    """Tokens that all requests of the step see."""


class Frame:
    """Tables of one step, and the layer that is running."""

    __slots__ = ("adapters", "attention_layer", "memory", "positions", "shifts", "state_layer", "tables")

    def __init__(
        self,
        memory: Memory,
        positions: torch.Tensor,
        shifts: torch.Tensor,
        tables: Tables,
        adapters: StepAdapters | None = None,
    ) -> None:
        self.memory = memory
        self.positions = positions
        """Position of each packed token in its own request."""
        self.shifts = shifts
        """Position of each packed token minus its index in the packed row."""
        self.tables = tables
        self.adapters = adapters
        """None if no token of the step has an adapter."""
        self.attention_layer = -1
        """The layer whose attention comes next."""
        self.state_layer = -1
        """The layer whose convolution and scan come next."""

    def tokens(self, layer: LayerMemory) -> TokenTable | DecodeTokens:
        """The token table of a layer."""
        return self.tables.tokens[layer.group]

    def segments(self, layer: LayerMemory) -> SegmentTable | DecodeStates:
        """The segment table of a layer's states. A state that spans several pages has one table for each."""
        return self.tables.segments[StateKey(layer.group, layer.page)]


class _Active(threading.local):
    frame: Frame | None = None


_active = _Active()


def active() -> Frame | None:
    """The frame of the step that this thread is running, or None. Without one, models run their stock code."""
    return _active.frame


def current() -> Frame:
    frame = _active.frame
    if frame is None:
        raise HybridKVError("a paged model was called outside an engine's step: use the engine, or load it afresh")
    return frame


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_running() -> bool:
    """Whether this thread is running a step. A compiler evaluates this once for each graph."""
    return _active.frame is not None


def sees_layers() -> bool:
    """False while compiling: layer numbers are hidden from the compiler, so that one graph serves all layers of a kind.

    The frame has the number before the graph runs. Read a layer's number only if this returns True: a compiler guards
    on every number that it sees.
    """
    return not torch.compiler.is_dynamo_compiling()


@contextmanager
def running(frame: Frame) -> Iterator[Frame]:
    """Make `frame` active during one forward pass."""
    if _active.frame is not None:
        raise HybridKVError("a step was started inside another one on the same thread")
    _active.frame = frame
    try:
        yield frame
    finally:
        _active.frame = None
