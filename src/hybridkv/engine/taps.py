"""Hidden states: the layers that requests tap, the way of rows into their pages during a step, and back out of them.

Layer i is the residual stream that enters decoder layer i. Layer N, of a model with N layers, is the output of the last
one. "final" is that after the final norm; inside it has the number N + 1. A hook writes the rows of a step. It is added
with the first request for its layer, and does nothing in steps without such a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hybridkv.cache import StepTables
from hybridkv.errors import RequestError
from hybridkv.kernels.spans import Span
from hybridkv.memory import Memory, Uploader

FINAL = "final"
Layer: TypeAlias = int | str


class Tapped(NamedTuple):
    """Layers whose hidden states a request asks for."""

    numbers: tuple[int, ...] = ()
    names: tuple[Layer, ...] = ()
    """As results name them: counted from 0, and "final"."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The cache's groups for them."""
        return tuple(tap_name(number) for number in self.numbers)


NO_TAPS = Tapped()


def resolve(layers: Sequence[Layer], num_layers: int) -> Tapped:
    """The layers that a request names: negative numbers count from the end, -1 is the output of the last layer."""
    found: list[int] = []
    for layer in layers:
        number = num_layers + 1 if layer == FINAL else layer
        if not isinstance(number, int) or not -num_layers - 1 <= number <= num_layers + (layer == FINAL):
            raise RequestError(
                f"hidden_layers has {layer!r}: this model's are 0 to {num_layers} (-1 is {num_layers}), and "
                f"{FINAL!r} after the norm",
                "hidden_layers",
            )
        number = number if number >= 0 else num_layers + 1 + number
        if number in found:
            raise RequestError(f"hidden_layers has layer {layer!r} twice: name each once", "hidden_layers")
        found.append(number)
    return Tapped(tuple(found), tuple(FINAL if number > num_layers else number for number in found))


def tap_name(layer: int) -> str:
    """The cache's group for a tapped layer."""
    return f"tap{layer}"


class _Rows(NamedTuple):
    """Rows of a packed step that one tapped layer keeps, and where: slab, page of the slab, token of the page."""

    rows: Tensor
    slabs: Tensor
    pages: Tensor
    offsets: Tensor


class Taps:
    """Writes hidden states of one model's layers into pages of one arena, and reads them."""

    def __init__(self, decoder: nn.Module, layers: Sequence[nn.Module], memory: Memory, uploader: Uploader) -> None:
        """`decoder`: the module that runs `layers` and the final norm."""
        self._decoder = decoder
        self._layers = layers
        self._memory = memory
        self._uploader = uploader
        self._layer_of = {tap_name(layer): layer for layer in memory.taps}
        self._hooks: dict[int, Any] = {}
        self._step: dict[int, _Rows] = {}
        """Rows of the step that runs now, by layer."""

    def begin(self, spans: Sequence[Span], steps: Sequence[StepTables]) -> None:
        """A step is about to run. Its records travel with those of the step."""
        self._step = {}
        using: dict[str, list[tuple[Span, StepTables]]] = {}
        for span, step in zip(spans, steps, strict=True):
            for name in step.tables:
                if name in self._layer_of:
                    using.setdefault(name, []).append((span, step))
        for name, tapped in using.items():
            layer = self._layer_of[name]
            self._step[layer] = self._rows(name, tapped)
            if layer not in self._hooks:
                self._hooks[layer] = self._hook(layer)

    def end(self) -> None:
        self._step = {}

    def is_used(self, step: StepTables) -> bool:
        """Whether a request taps layers."""
        return any(name in self._layer_of for name in step.tables)

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def read(self, tables: Mapping[str, Sequence[int]], layers: Sequence[int], count: int) -> Tensor:
        """Rows of the first `count` tokens of a request, on the host: `[count, layers, hidden]`."""
        first = self._kept(layers[0])
        found = torch.empty((count, len(layers), first.shape[3]), dtype=first.dtype)
        num_blocks = -(-count // first.shape[2])
        for index, layer in enumerate(layers):
            kept = self._kept(layer)
            pages = torch.tensor(list(tables[tap_name(layer)][:num_blocks]), device=kept.device)
            rows = kept[pages // kept.shape[1], pages % kept.shape[1]].flatten(0, 1)
            found[:, index] = rows[:count].to(found.device)
        return found

    def _rows(self, name: str, tapped: Sequence[tuple[Span, StepTables]]) -> _Rows:
        per_slab = self._kept(self._layer_of[name]).shape[1]
        size = tapped[0][1].block_tokens
        rows = np.concatenate([np.arange(span.row, span.row + span.length) for span, _ in tapped])
        positions = [np.arange(span.start, span.start + span.length) for span, _ in tapped]
        pages = np.concatenate(
            [np.asarray(step.tables[name])[at // size] for (_, step), at in zip(tapped, positions, strict=True)]
        )
        offsets = np.concatenate(positions) % size
        sent = self._uploader.send(name, rows=rows, slabs=pages // per_slab, pages=pages % per_slab, offsets=offsets)
        return _Rows(**sent)

    def _kept(self, layer: int) -> Tensor:
        """All pages of a layer: `[slabs, pages of a slab, tokens, hidden]`."""
        return self._memory.tap(layer).parts["hidden"].squeeze(3)

    def _hook(self, layer: int) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._write(layer, args[0] if args else kwargs["hidden_states"])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._write(layer, output if isinstance(output, Tensor) else output[0])

        if layer < len(self._layers):
            return self._layers[layer].register_forward_pre_hook(before, with_kwargs=True)
        return (self._layers[-1] if layer == len(self._layers) else self._decoder).register_forward_hook(after)

    def _write(self, layer: int, hidden: Tensor) -> None:
        rows = self._step.get(layer)
        if rows is None:
            return
        hidden = hidden.flatten(0, -2) if hidden.dim() < 4 else hidden[0].flatten(0, -2)  # Gemma-3n has four streams
        kept = self._kept(layer)
        kept[rows.slabs, rows.pages, rows.offsets] = hidden[rows.rows].to(kept.dtype)
