"""Bytes of the stored form in vLLM's tensors, against formulas of one element each that know no boxes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hosted import BLOCK, FAMILIES, NUM_BLOCKS, Family
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)

from hybridkv.errors import InputError
from hybridkv.integrations.vllm import placement
from hybridkv.integrations.vllm.catalogue import make_catalogue
from hybridkv.integrations.vllm.pages import LayerPages
from hybridkv.integrations.vllm.placement import AFTER_ALL_LAYERS, BEFORE_ALL_LAYERS, place
from hybridkv.stream import Catalogue
from hybridkv.stream.boxes import Axis, Span
from hybridkv.stream.form import Chunk, StoredGroup
from hybridkv.stream.lattice import Lattice, lattice

PAGE = 16
Index = Any
"""A number, or an array of numbers: a formula then gives the places of many elements."""
Formula = Callable[[torch.Tensor, int, Index, Index, Index, Index], Index]
"""Byte offset from a tensor's first element of (part, block, token, head, dim)."""


def element(tensor: torch.Tensor, *index: Index) -> Index:
    return sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True)) * tensor.itemsize


# Where attention backends put an element of K (part 0) or V (part 1). A tensor is [blocks, heads, tokens, K + V].


def by_token(tensor: torch.Tensor, part: int, block: Index, token: Index, head: Index, dim: Index) -> Index:
    """FlashAttention and others: K and V of a token side by side."""
    return element(tensor, block, head, token, part * tensor.shape[3] // 2 + dim)


def cpu_vec(tensor: torch.Tensor, part: int, block: Index, token: Index, head: Index, dim: Index) -> Index:
    """Inside a (block, head): K is [dim, token], then V is [token, dim]."""
    tokens, dims = tensor.shape[2], tensor.shape[3] // 2
    inside = dim * tokens + token if part == 0 else tokens * dims + token * dims + dim
    return element(tensor, block, head, 0, 0) + inside * tensor.itemsize


def cpu_amx(tensor: torch.Tensor, part: int, block: Index, token: Index, head: Index, dim: Index) -> Index:
    """Inside a (block, head): K is [token / 16][dim / 2][16][2], then V is [dim / 16][token / 2][16][2]."""
    tokens, dims = tensor.shape[2], tensor.shape[3] // 2
    if part == 0:
        inside = ((token // 16 * (dims // 2) + dim // 2) * 16 + token % 16) * 2 + dim % 2
    else:
        inside = tokens * dims + ((dim // 16 * (tokens // 2) + token // 2) * 16 + dim % 16) * 2 + token % 2
    return element(tensor, block, head, 0, 0) + inside * tensor.itemsize


def latent(tensor: torch.Tensor, part: int, block: Index, token: Index, head: Index, dim: Index) -> Index:
    """MLA: the latent, here of 32 elements, then the rotated key."""
    return element(tensor, block, 0, token, part * 32 + dim)


FORMULAS: dict[str, Formula] = {"by_token": by_token, "cpu_vec": cpu_vec, "cpu_amx": cpu_amx}


def places(formula: Formula, tensor: torch.Tensor, part: int, heads: int, dims: int) -> np.ndarray:
    """[blocks, tokens, heads, dims], by the formula."""
    block, token, head, dim = np.indices((tensor.shape[0], tensor.shape[2], heads, dims))
    found: np.ndarray = formula(tensor, part, block, token, head, dim)
    return found


# A worker's memory.


class Memory(NamedTuple):
    """Everything of one rank, as vLLM has registered it."""

    raw: dict[str, torch.Tensor]
    """The whole allocation that has each layer, by its name."""
    tensors: dict[str, torch.Tensor]
    names: dict[tuple[int, bool], str]
    specs: dict[str, KVCacheSpec]
    catalogue: Catalogue
    pages: LayerPages

    def chunks(self, is_state: bool) -> list[tuple[StoredGroup, Chunk, str]]:
        groups = self.catalogue.state_groups if is_state else self.catalogue.token_groups
        return [(one, chunk, self.names[chunk.layers[0].layer, is_state]) for one in groups for chunk in one.chunks]

    def bytes_of(self, name: str) -> np.ndarray:
        return self.raw[name].numpy().view(np.uint8)

    def start(self, name: str) -> int:
        """Offset of a layer's first element, in its allocation."""
        return self.tensors[name].data_ptr() - self.raw[name].data_ptr()

    def write(self, chunk: Chunk, span: Span, row: np.ndarray) -> None:
        staged = self.pages.stage(len(row))
        staged[:] = row.data
        self.pages.copy_in(chunk, span, staged)

    def read(self, chunk: Chunk, span: Span) -> np.ndarray:
        copy = self.pages.copy_out(chunk, span)
        copy.wait()
        return np.frombuffer(copy.data, np.uint8)


def allocate(
    specs: Mapping[str, KVCacheSpec], layout: KVCacheLayout, kernel_block: int | None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Layers with equal specs share an allocation, as vLLM makes them: all allocations, and all layers' tensors."""
    together: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        together.setdefault(spec, []).append(name)
    raws, tensors = {}, {}
    for spec, names in together.items():
        used = KVCacheLayout.LBHNC if isinstance(spec, MambaSpec) and layout.is_layer_compact else layout
        kernel = None if isinstance(spec, MambaSpec) else kernel_block
        strides = compute_layout_strides(spec, NUM_BLOCKS, len(names), used)
        size = len(names) * NUM_BLOCKS * spec.page_size_bytes
        raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
        placed = KVCacheTensor(size, names, strides[0], strides[1])
        views = create_kv_cache_views(raw, spec, NUM_BLOCKS, used, placed, kernel)
        tensors |= dict(zip(names, views, strict=True))
        raws |= dict.fromkeys(names, raw)
    return raws, tensors


class FullLayer(Attention):
    """vLLM's class, without weights and backend."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.impl, self.spec = None, spec


class LatentLayer(MLAAttention):
    """As `FullLayer`."""

    __init__ = FullLayer.__init__


def modules_of(specs: Mapping[str, KVCacheSpec]) -> dict[str, Any]:
    """vLLM's layers by name."""
    made: dict[type[KVCacheSpec], Callable[[Any], Any]] = {MambaSpec: lambda _: None, MLAAttentionSpec: LatentLayer}
    return {name: made.get(type(spec), FullLayer)(spec) for name, spec in specs.items()}


def probe_of(formula: Formula) -> Callable[[Any, torch.Tensor], tuple[Lattice, Lattice]]:
    """What a probe finds if a backend writes by a formula."""

    def probe(module: Any, tensor: torch.Tensor) -> tuple[Lattice, Lattice]:
        spec = module.spec
        sizes = (32, 8) if isinstance(spec, MLAAttentionSpec) else (spec.head_size, spec.head_size_v)
        found = [places(formula, tensor, part, spec.num_kv_heads, dims) for part, dims in enumerate(sizes)]
        if isinstance(spec, MLAAttentionSpec):
            found = [part.squeeze(2) for part in found]
        first, second = (lattice(part) for part in found)
        assert first is not None
        assert second is not None
        return first, second

    return probe


def memory(
    family: Family,
    monkeypatch: pytest.MonkeyPatch,
    tp: int = 1,
    rank: int = 0,
    *,
    formula: Formula = by_token,
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    kernel_block: int | None = None,
) -> Memory:
    monkeypatch.setattr(placement, "probe_kv", probe_of(formula))
    monkeypatch.setattr(placement, "probe_latent", probe_of(latent))
    specs, layers = family.specs(tp), family.layers(tp, rank)
    raw, tensors = allocate(specs, layout, kernel_block)
    modules = modules_of(specs)
    stored = make_catalogue(family.model(tp, rank))
    buffers = place(stored, layers, tensors, modules)
    names = {(key.layer, key.is_state): one.name for key, one in layers.items()}
    return Memory(raw, tensors, names, specs, stored, LayerPages(buffers))


def random_span(tensor: torch.Tensor, rng: random.Random, *, whole: bool) -> Span:
    """Pages in any order, some left out unless `whole`, the last one full or not."""
    pages_per_block = tensor.shape[2] // PAGE
    count = rng.randint(1, 2 * NUM_BLOCKS * BLOCK // PAGE // 3)
    pages: list[int | None] = list(rng.sample(range(tensor.shape[0] * pages_per_block), count))
    if not whole:
        pages = [None if rng.random() < 0.3 else page for page in pages]
    return Span(pages, count * PAGE - rng.choice([0, 0, *range(PAGE)]), PAGE)


# --- tokens -----------------------------------------------------------------------------------------------------------


def put_token(
    into: np.ndarray, rank: Memory, name: str, formula: Formula, index: tuple[int, int, int, int], data: np.ndarray
) -> None:
    """The elements of one token, which is on a page, in one head of one part."""
    part, page, token, head = index
    block, first = divmod(page * PAGE, rank.tensors[name].shape[2])
    dims = np.arange(len(data) // 2)
    to = rank.start(name) + formula(rank.tensors[name], part, block, first + token % PAGE, head, dims)
    into[to], into[to + 1] = data[::2], data[1::2]


def check_tokens(rank: Memory, formula: Formula, seed: int) -> None:
    rng, random_bytes = random.Random(seed), np.random.default_rng(seed)
    for _, chunk, name in rank.chunks(is_state=False):
        tensor, spec = rank.tensors[name], rank.specs[name]
        assert isinstance(spec, AttentionSpec)
        sizes = (32, 8) if isinstance(spec, MLAAttentionSpec) else (spec.head_size, spec.head_size_v)
        span = random_span(tensor, rng, whole=False)
        row = random_bytes.integers(0, 256, chunk.nbytes(span.num_tokens), np.uint8)
        assert len(row) == spec.num_kv_heads * span.num_tokens * sum(sizes) * 2
        expected, at = rank.bytes_of(name).copy(), 0
        for head, part in product(range(spec.num_kv_heads), range(2)):
            for token in range(span.num_tokens):
                page, size = span.pages[token // PAGE], 2 * sizes[part]
                if page is not None:
                    put_token(expected, rank, name, formula, (part, page, token, head), row[at : at + size])
                at += size
        rank.write(chunk, span, row)
        assert np.array_equal(rank.bytes_of(name), expected)

        whole = random_span(tensor, rng, whole=True)
        row = random_bytes.integers(0, 256, chunk.nbytes(whole.num_tokens), np.uint8)
        rank.write(chunk, whole, row)
        assert np.array_equal(rank.read(chunk, whole), row)


@pytest.mark.parametrize("name", FAMILIES)
def test_hooks_find_the_rows_of_their_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook knows a layer by the number in its name."""
    rank = memory(FAMILIES[name], monkeypatch)
    for _, chunk, layer in rank.chunks(is_state=False):
        assert chunk.row.first_layer == chunk.row.last_layer == extract_layer_index(layer)
    for _, chunk, _ in rank.chunks(is_state=True):
        assert (chunk.row.first_layer, chunk.row.last_layer) == (BEFORE_ALL_LAYERS, AFTER_ALL_LAYERS)


def test_attention_without_hooks_is_complete_before_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FullLayer", lambda spec: SimpleNamespace(impl=None, spec=spec))
    rank = memory(FAMILIES["qwen3_next"], monkeypatch)
    assert {(chunk.row.first_layer, chunk.row.last_layer) for _, chunk, _ in rank.chunks(is_state=False)} == {
        (BEFORE_ALL_LAYERS, AFTER_ALL_LAYERS)
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC,
                                    KVCacheLayout.BLNHC, KVCacheLayout.BHLNC], ids=str)  # fmt: skip
def test_tokens_side_by_side(layout: KVCacheLayout, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads inside or outside tokens, layers inside or outside blocks."""
    family = FAMILIES["gemma3_text"]
    check_tokens(memory(family, monkeypatch, layout=layout), by_token, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC], ids=str)
@pytest.mark.parametrize("formula", [cpu_vec, cpu_amx])
def test_tokens_in_the_layouts_of_cpus(
    formula: Formula, layout: KVCacheLayout, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_tokens(memory(FAMILIES["gemma3_text"], monkeypatch, formula=formula, layout=layout), formula, seed)


@pytest.mark.parametrize("formula", [by_token, cpu_vec, cpu_amx])
def test_tokens_in_blocks_that_kernels_cut(formula: Formula, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM registers the smaller blocks. A page has the same number with both."""
    rank = memory(FAMILIES["llama4_text"], monkeypatch, formula=formula, layout=KVCacheLayout.LBHNC, kernel_block=16)
    assert {tensor.shape[0] for tensor in rank.tensors.values()} == {2 * NUM_BLOCKS}
    check_tokens(rank, formula, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gpt_oss", "falcon_h1", "qwen3_next"])
def test_tokens_of_other_families(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tokens(memory(FAMILIES[name], monkeypatch, tp=2, rank=1, formula=cpu_amx, layout=KVCacheLayout.LBHNC), cpu_amx, seed)  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC], ids=str)
def test_latents(layout: KVCacheLayout, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tokens(memory(FAMILIES["kimi_linear"], monkeypatch, layout=layout), latent, seed)


def test_zeroed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of a page become zero, and nothing else."""
    rank = memory(FAMILIES["gemma3_text"], monkeypatch, formula=cpu_amx, layout=KVCacheLayout.LBHNC)
    _, chunk, name = rank.chunks(is_state=False)[0]
    expected = rank.bytes_of(name).copy()
    for index in product(range(2), (3, 8), range(PAGE), range(2)):
        put_token(expected, rank, name, cpu_amx, index, np.zeros(32, np.uint8))
    rank.pages.zero(chunk, [3, 8], PAGE)
    assert np.array_equal(rank.bytes_of(name), expected)


# What has no place.


def test_heads_outside_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of some backends for ROCm."""
    with pytest.raises(InputError, match=r"model\.layers\.\d\.self_attn\.attn: .*VLLM_KV_CACHE_LAYOUT"):
        memory(FAMILIES["gemma3_text"], monkeypatch, layout=KVCacheLayout.LHBNC)


def placed_with(monkeypatch: pytest.MonkeyPatch, found: tuple[Lattice, Lattice] | None) -> None:
    family = FAMILIES["gpt_oss"]
    monkeypatch.setattr(placement, "probe_kv", lambda module, tensor: found)
    _, tensors = allocate(family.specs(1), KVCacheLayout.LBHNC, None)
    modules = modules_of(family.specs(1))
    place(make_catalogue(family.model()), family.layers(), tensors, modules)


def test_a_layout_that_no_probe_understands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"model\.layers\.\d\.attn\.attn: .* choose another attention backend"):
        placed_with(monkeypatch, None)


@pytest.mark.parametrize("tokens", [(Axis(4, 512), Axis(8, 32)), (Axis(2, 16), Axis(2, 512), Axis(8, 32))], ids=str)
def test_tokens_that_can_be_cut_into_pages(tokens: tuple[Axis, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Lattice(0, ((Axis(NUM_BLOCKS, 2048),), tokens, (), (Axis(16, 2),)))
    placed_with(monkeypatch, (one, one))


@pytest.mark.parametrize("tokens", [
    (Axis(8, 64),),
    (Axis(3, 512), Axis(8, 32)),
    (Axis(2, 1024), Axis(3, 256), Axis(16, 16)),
], ids=str)  # fmt: skip
def test_tokens_that_cannot_be_cut_into_pages(tokens: tuple[Axis, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Lattice(0, ((Axis(NUM_BLOCKS, 2048),), tokens, (), (Axis(16, 2),)))
    with pytest.raises(InputError, match=r"model\.layers\.\d\.attn\.attn: .* cut into blocks of 16 tokens"):
        placed_with(monkeypatch, (one, one))


def test_heads_at_unequal_distances_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = (Axis(2, 1024), Axis(2, 16))
    one = Lattice(0, ((Axis(NUM_BLOCKS, 4096),), (Axis(32, 32),), heads, (Axis(16, 2),)))
    with pytest.raises(InputError, match=r"model\.layers\.\d\.attn\.attn"):
        placed_with(monkeypatch, (one, one))


def test_a_state_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["lfm2"]
    monkeypatch.setattr(placement, "probe_kv", probe_of(by_token))
    specs = family.specs(1)
    _, tensors = allocate(specs, KVCacheLayout.LBHNC, None)
    modules = modules_of(specs)
    for wrong in (lambda state: state[..., :100], lambda state: torch.cat([state, state], -1)[..., ::2]):
        states = {name: wrong(t) if isinstance(specs[name], MambaSpec) else t for name, t in tensors.items()}
        with pytest.raises(InputError, match=r"model\.layers\.0\.short_conv: .*256 bytes"):
            place(make_catalogue(family.model()), family.layers(), states, modules)


# --- states -----------------------------------------------------------------------------------------------------------
# A state of the whole model: each run of a convolution [channels, taps], and the recurrent state.

STATES = [name for name, family in FAMILIES.items() if any(isinstance(s, MambaSpec) for s in family.specs(1).values())]
DELTA_RULE = ("qwen3_next", "olmo_hybrid", "kimi_linear")
WHOLE: dict[str, tuple[list[int], tuple[int, ...] | None]] = {
    "qwen3_next": ([32, 32, 32], (4, 16, 8)),
    "olmo_hybrid": ([24, 24, 48], (4, 6, 12)),
    "kimi_linear": ([32, 32, 32], (4, 8, 8)),
    "nemotron_h": ([32, 32, 32], (4, 8, 16)),
    "bamba": ([128, 12, 12], (8, 16, 12)),
    "falcon_h1": ([32, 16, 16], (4, 8, 16)),
    "zamba2": ([128, 48, 48], (8, 16, 24)),
    "jamba": ([128], (128, 6)),
    "lfm2": ([64], None),
    "minimax": ([], (4, 16, 16)),
}
"""Channels of each run of a convolution, and the shape of a recurrent state in the stored form."""
SHARED = {"bamba", "falcon_h1"}
"""Models with one group of B and C, which all ranks have."""
TAPS = {"lfm2": 2}


class WholeState(NamedTuple):
    runs: list[np.ndarray]
    recurrent: np.ndarray | None


def random_state(name: str, spec: MambaSpec, seed: int) -> WholeState:
    random_bytes, (channels, shape) = np.random.default_rng(seed), WHOLE[name]
    runs = [random_bytes.integers(0, 2**16, (count, TAPS.get(name, 3)), np.uint16) for count in channels]
    bits = np.uint32 if spec.dtypes[-1].itemsize == 4 else np.uint16
    return WholeState(runs, None if shape is None else random_bytes.integers(0, 2**16, shape, bits))


def part_of(array: np.ndarray, tp: int, rank: int) -> np.ndarray:
    size = len(array) // tp
    return array[rank * size : (rank + 1) * size]


def local_state(name: str, whole: WholeState, tp: int, rank: int) -> WholeState:
    """What vLLM gives one rank."""
    runs = [run if name in SHARED and number else part_of(run, tp, rank) for number, run in enumerate(whole.runs)]
    return WholeState(runs, None if whole.recurrent is None else part_of(whole.recurrent, tp, rank))


def bound(spec: MambaSpec, tensor: torch.Tensor) -> list[np.ndarray]:
    """The state tensors as vLLM's own layers see them."""
    layer: Any = SimpleNamespace(get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes)
    MambaBase.bind_kv_cache(layer, tensor)
    bits = {2: torch.int16, 4: torch.int32}
    kinds = {2: np.uint16, 4: np.uint32}
    return [one.view(bits[one.itemsize]).numpy().view(kinds[one.itemsize]) for one in layer.kv_cache]


def put(name: str, spec: MambaSpec, tensor: torch.Tensor, block: int, local: WholeState, layout: str) -> None:
    """Element by element, where vLLM's kernels look for it."""
    found = bound(spec, tensor)
    if local.runs:
        channels = np.concatenate(local.runs)
        for channel, tap in np.ndindex(*channels.shape):
            index = (channel, tap) if layout == "DS" else (tap, channel)
            found[0][(block, *index)] = channels[channel, tap]
    if local.recurrent is not None:
        for index in np.ndindex(*local.recurrent.shape):
            head, *inner = index
            there = (head, *reversed(inner)) if name in DELTA_RULE else index
            found[-1][(block, *there)] = local.recurrent[index]


def stored_row(name: str, group: StoredGroup, whole: WholeState) -> bytes:
    """The row of all slices, as docs/store.md has it."""
    is_small = group.name in ("state-1", "state-2")  # B and C of groups, which have fewer slices than heads
    is_large = group.name != "state" and not is_small
    arrays = [] if is_small else whole.runs[:1]
    arrays += [] if is_large else whole.runs[1:]
    if whole.recurrent is not None and not is_small:
        arrays.append(whole.recurrent)
    cut = [part_of(array, group.slices, number).tobytes() for number in range(group.slices) for array in arrays]
    return b"".join(cut)


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", STATES)
def test_states(name: str, tp: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row becomes a state where vLLM reads it, and the rows of all ranks, end to end, are the row of one alone."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
    blocks = KVCacheLayout.LBHNC if tp == 1 else KVCacheLayout.BLHNC
    for rank in range(tp):
        mine = memory(FAMILIES[name], monkeypatch, tp, rank, layout=blocks)
        for seed, (group, chunk, layer) in enumerate(mine.chunks(is_state=True)):
            spec = mine.specs[layer]
            assert isinstance(spec, MambaSpec)
            before = mine.bytes_of(layer).copy()
            whole, block = random_state(name, spec, chunk.layers[0].layer), seed % NUM_BLOCKS
            row = stored_row(name, group, whole)
            size = len(row) // group.share.total
            own = np.frombuffer(row[group.share.number * size : (group.share.number + 1) * size], np.uint8)
            mine.write(chunk, Span([block], 1, 1), own)
            written = mine.bytes_of(layer).copy()
            assert np.array_equal(mine.read(chunk, Span([block], 1, 1)), own)

            # The other groups of the same layer have the rest of the state.
            others = [one for one in mine.chunks(is_state=True) if one[2] == layer and one[1] is not chunk]
            for other, rest, _ in others:
                others_row = stored_row(name, other, whole)
                size = len(others_row) // other.share.total
                start = other.share.number * size
                mine.write(rest, Span([block], 1, 1), np.frombuffer(others_row[start : start + size], np.uint8))
            complete = mine.bytes_of(layer).copy()
            if not others:
                assert np.array_equal(complete, written)
            mine.bytes_of(layer)[:] = before
            put(name, spec, mine.tensors[layer], block, local_state(name, whole, tp, rank), layout)
            assert np.array_equal(mine.bytes_of(layer), complete)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shares_of_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have half of everything each, but for what both have."""
    for group in memory(FAMILIES[name], monkeypatch, 2, 1).catalogue.groups:
        is_shared = group.name in ("state-1", "latent") or (name == "gpt_oss")
        assert group.share == ((0, 1) if is_shared else (1, 2))


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "kimi_linear"])
def test_the_rows_of_ranks_end_to_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that vLLM computed at TP 2 are the row that it stores at TP 1."""
    formula = latent if name == "kimi_linear" else by_token
    alone = memory(FAMILIES[name], monkeypatch)
    ranks = [memory(FAMILIES[name], monkeypatch, 2, rank) for rank in range(2)]
    span, random_bytes = Span([4, 1, 7], 2 * PAGE + 5, PAGE), np.random.default_rng(1)
    for number, (group, chunk, layer) in enumerate(alone.chunks(is_state=False)):
        spec = alone.specs[layer]
        assert isinstance(spec, AttentionSpec)
        sizes = (32, 8) if isinstance(spec, MLAAttentionSpec) else (spec.head_size, spec.head_size_v)
        for part, token, head in product(range(2), range(span.num_tokens), range(spec.num_kv_heads)):
            page, data = span.pages[token // PAGE], random_bytes.integers(0, 256, 2 * sizes[part], np.uint8)
            assert page is not None
            local = spec.num_kv_heads // 2 or 1
            holders = ranks if spec.num_kv_heads == 1 else [ranks[head // local]]
            for holder, its_head in [(alone, head), *((one, head % local) for one in holders)]:
                put_token(holder.bytes_of(layer), holder, layer, formula, (part, page, token, its_head), data)
        theirs = [rank.chunks(is_state=False)[number] for rank in ranks]
        assert [one[2] for one in theirs] == [layer, layer]
        rows = [rank.read(one[1], span) for rank, one in zip(ranks, theirs, strict=True) if one[0].is_writer]
        assert np.array_equal(np.concatenate(rows), alone.read(chunk, span))
        assert group.share == (0, 1)
