"""Placement: where the parts of each stored layer lie in the tensors that vLLM has registered.

A block of vLLM's is a slab of pages of 16 tokens, and a state is a page of its own. So everything in `stream` that
copies pages works on vLLM's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.v1.kv_cache_interface import MambaSpec

from hybridkv.errors import InputError
from hybridkv.integrations.vllm.groups import KnownLayer, LayerKey, state_axes
from hybridkv.integrations.vllm.probe import probe_kv, probe_latent
from hybridkv.plan import Row
from hybridkv.spec import LatentAttention, LinearState, Part
from hybridkv.stream import Catalogue
from hybridkv.stream.boxes import Axis, PageGrid
from hybridkv.stream.form import Chunk, Field, StoredGroup, StoredLayer
from hybridkv.stream.lattice import Lattice

BEFORE_ALL_LAYERS = -1
AFTER_ALL_LAYERS = 1 << 20
"""Layers without hooks are loaded before the first layer and saved after the last."""


def place(
    catalogue: Catalogue, layers: Mapping[LayerKey, KnownLayer], tensors: Mapping[str, torch.Tensor], modules: Any
) -> dict[Chunk, torch.Tensor]:
    """Make the catalogue's chunks those of vLLM's memory. Returns the buffer of each.

    `modules`: vLLM's layers by name, whose own cache writes show where tokens lie.
    """
    buffers: dict[Chunk, torch.Tensor] = {}
    block_tokens, probes = catalogue.block_tokens, _Probes()

    def placed(group: StoredGroup) -> StoredGroup:
        chunks = []
        for number, layer in enumerate(group.layers):
            known = layers[LayerKey(layer.layer, group.is_state)]
            tensor = tensors[known.name]
            if group.is_state:
                found, buffer, grid = _place_state(known, layer, tensor)
            else:
                found, buffer, grid = _place_tokens(
                    known, layer, tensor, probes.of(known, tensor, modules), block_tokens
                )
            has_hooks = calls_hooks(modules[known.name])
            row = _row(known.number, known.number) if has_hooks else _row(BEFORE_ALL_LAYERS, AFTER_ALL_LAYERS)
            chunk = Chunk(grid, known.table.name, row, number, (found,))
            buffers[chunk] = buffer
            chunks.append(chunk)
        return replace(group, layers=tuple(chunk.layers[0] for chunk in chunks), chunks=tuple(chunks))

    catalogue.place(placed)
    return buffers


def calls_hooks(module: object) -> bool:
    """Return whether vLLM calls the connector before and after this layer.

    Its two attention classes do. States do not, and Kimi-Linear's latent attention, a class of its own, does not.
    """
    return isinstance(module, (Attention, MLAAttention))


def _row(first: int, last: int) -> Row:
    """A row that stands for hooks only: the numbers of the layers that wait for it and that complete it."""
    return Row((first, last), 0, 0, 0, ())


# --- tokens -----------------------------------------------------------------------------------------------------------


class _Probes:
    """Probes of layers. Layers of the same shapes and backend need one."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], tuple[Lattice, Lattice] | None] = {}

    def of(self, known: KnownLayer, tensor: torch.Tensor, modules: Any) -> tuple[Lattice, Lattice]:
        module = modules[known.name]
        key = (type(module.impl), getattr(module, "isa", None), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._found:
            probe = probe_latent if isinstance(known.ours, LatentAttention) else probe_kv
            self._found[key] = probe(module, tensor)
        found = self._found[key]
        if found is None:
            raise InputError(
                f"{known.name}: the layout of vLLM's blocks ({tuple(tensor.shape)} of {tensor.dtype}) is not "
                f"understood; choose another attention backend"
            )
        return found


def _place_tokens(
    known: KnownLayer, layer: StoredLayer, tensor: torch.Tensor, lattices: tuple[Lattice, Lattice], block_tokens: int
) -> tuple[StoredLayer, torch.Tensor, PageGrid]:
    fields, slab_bytes = [], tensor.stride(0) * tensor.itemsize
    grid = PageGrid(slab_bytes, 1, slab_bytes)
    for (part, _), lattice in zip(layer.parts, lattices, strict=True):
        _, tokens, *heads, elements = lattice.axes
        pages, in_page = _cut(known.name, tokens, block_tokens)
        grid = PageGrid(slab_bytes, pages.size, pages.stride)
        head_stride = _head_stride(known.name, [axis for digits in heads for axis in digits], slab_bytes)
        inner = () if elements == (Axis(part.inner[0], tensor.itemsize),) else elements
        fields.append(Field(lattice.offset, head_stride, in_page, part.inner[0] * tensor.itemsize, inner, pages.stride))
    return replace(layer, fields=tuple(fields)), _bytes_of(tensor, grid.slab_bytes), grid


def _head_stride(name: str, heads: Sequence[Axis], slab_bytes: int) -> int:
    """Distance of two heads. Latents have none, and a single head needs none."""
    if len(heads) > 1 or any(axis.size * axis.stride > slab_bytes for axis in heads):
        raise InputError(
            f"{name}: the heads of vLLM's blocks lie outside of them, or at unequal distances, which is not supported; "
            f"set VLLM_KV_CACHE_LAYOUT to LBHNC, or choose another attention backend"
        )
    return heads[0].stride if heads else 0


def _cut(name: str, tokens: Sequence[Axis], block_tokens: int) -> tuple[Axis, tuple[Axis, ...]]:
    """Cut the token axis of vLLM's block into pages of `block_tokens`: the axis of pages, and those inside a page."""
    outer, inner, left = list[Axis](), list[Axis](), block_tokens
    for axis in reversed(tokens):
        if left > 1 and axis.size > left and axis.size % left == 0:
            inner.append(Axis(left, axis.stride))
            outer.append(Axis(axis.size // left, axis.stride * left))
            left = 1
        elif left % axis.size == 0:
            inner.append(axis)
            left //= axis.size
        else:
            outer.append(axis)
    if left > 1 or len(outer) > 1:
        raise InputError(f"{name}: vLLM's blocks cannot be cut into blocks of {block_tokens} tokens")
    return outer[0] if outer else Axis(1, 0), tuple(reversed(inner))


# --- states -----------------------------------------------------------------------------------------------------------


def _place_state(
    known: KnownLayer, layer: StoredLayer, tensor: torch.Tensor
) -> tuple[StoredLayer, torch.Tensor, PageGrid]:
    """vLLM has the parts of a state end to end, each contiguous."""
    assert isinstance(known.ours, LinearState)
    assert isinstance(known.theirs, MambaSpec)
    block_bytes = tensor.stride(0) * tensor.itemsize
    sizes = [
        prod(shape) * dtype.itemsize for shape, dtype in zip(known.theirs.shapes, known.theirs.dtypes, strict=True)
    ]
    if prod(tensor.shape[1:]) * tensor.itemsize < sum(sizes) or tensor[0].is_contiguous() is False:
        raise InputError(
            f"{known.name}: vLLM's blocks of {tuple(tensor.shape[1:])} {tensor.dtype} do not hold a state of "
            f"{sum(sizes)} bytes as one run, which is not supported"
        )
    starts = {part.name: sum(sizes[:number]) for number, part in enumerate(known.ours.parts)}
    strides = {part.name: _strides(part, known.theirs) for part in known.ours.parts}
    fields = []
    for (part, run), held in zip(layer.parts, _runs_before(layer), strict=True):
        first, *others = strides[part.name]
        per_piece = run.count // layer.num_pieces
        axes = [Axis(per_piece, first), *(Axis(size, stride) for size, stride in zip(part.inner, others, strict=True))]
        nbytes = per_piece * prod(part.inner) * part.dtype.nbytes
        inner = () if _is_contiguous(axes, part.dtype.nbytes) else tuple(axes)
        offset = starts[part.name] + held * first
        fields.append(Field(offset, per_piece * first, (Axis(1, 0),), nbytes, inner))
    grid = PageGrid(block_bytes, 1, block_bytes)
    return replace(layer, fields=tuple(fields)), _bytes_of(tensor, block_bytes), grid


def _runs_before(layer: StoredLayer) -> list[int]:
    """For each stored run: the elements of the part's first axis before it."""
    before, searched = [], dict[str, int]()
    for part, run in layer.parts:  # in the part's order; runs may be equal, such as those of queries and keys
        index = part.runs.index(run, searched.get(part.name, 0))
        searched[part.name] = index + 1
        before.append(sum(one.count for one in part.runs[:index]))
    return before


def _strides(part: Part, theirs: MambaSpec) -> list[int]:
    """Distances along each axis of our part in vLLM's contiguous tensor."""
    strides, size = [0] * len(part.shape), part.dtype.nbytes
    for axis in reversed(state_axes(part, theirs)):
        strides[axis] = size
        size *= part.shape[axis]
    return strides


def _is_contiguous(axes: Sequence[Axis], size: int) -> bool:
    for axis in reversed(axes):
        if axis.stride != size:
            return False
        size *= axis.size
    return True


def _bytes_of(tensor: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """The memory from a tensor's first element to the end of its last block."""
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.itemsize
    nbytes = min(storage.nbytes() - start, tensor.shape[0] * block_bytes)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, start, (nbytes,))
