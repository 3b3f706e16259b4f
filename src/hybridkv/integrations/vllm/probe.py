"""Probes: where vLLM's own cache write puts every element of K and V inside a block.

The layout inside a block depends on the attention backend, on the instruction set and on vLLM's version, and vLLM
describes it nowhere. So a probe calls the write of a layer's backend on scratch blocks and looks where the elements
are. It never touches the live cache.

Every element has a number of its own. The probe writes it digit by digit, one digit a pass, as the low bits of a float:
all values are normal numbers, and all bits of their mantissas are used. So an element is found only if the write copies
it bit for bit. Caches that store something other than the values (quantised ones) have no probed layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from hybridkv.stream.boxes import Axis
from hybridkv.stream.lattice import Lattice, lattice

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    Write = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], None]
    """Writes parts `[tokens, ..]` to a cache, at slots `[tokens]`."""

LOG = logging.getLogger("hybridkv.vllm")

NUM_BLOCKS = 2
MOST_SCRATCH_BYTES = 2**30
_BITS_OF = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_UNWRITTEN = 0


def probe_kv(layer: Attention, cache: torch.Tensor) -> tuple[Lattice, Lattice] | None:
    """Where K and V lie in `cache` `[blocks, heads, tokens, K + V]`, which vLLM registered for this layer.

    Both lattices have the axes (block, token, head, dim), for all blocks. Offsets are bytes from the cache's first
    element. None if the layout has no such form, or if the layer's backend cannot write to scratch blocks. Call it
    after vLLM has made its metadata builders: on CPU they choose the instruction set of the layer.
    """
    heads = layer.num_kv_heads

    def write(parts: list[torch.Tensor], scratch: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, *parts, scratch, slots)

    return _probe(write, cache, [(heads, layer.head_size), (heads, layer.head_size_v)])


def probe_latent(layer: MLAAttention, cache: torch.Tensor) -> tuple[Lattice, Lattice] | None:
    """Where an MLA layer's latents and rotated keys lie in `cache` `[blocks, 1, tokens, latent + rope]`.

    As `probe_kv`, with the axes (block, token, element). The layer binds `[blocks, tokens, latent + rope]`, and that is
    what its backend writes to; both forms of `cache` are accepted.
    """

    def write(parts: list[torch.Tensor], scratch: torch.Tensor, slots: torch.Tensor) -> None:
        latent, rope = parts
        layer.impl.do_kv_cache_update(latent, rope.unsqueeze(1), scratch, slots, layer.kv_cache_dtype, layer._k_scale)

    if cache.dim() == 4 and cache.shape[1] == 1:
        cache = cache.squeeze(1)
    return _probe(write, cache, [(layer.kv_lora_rank,), (layer.qk_rope_head_dim,)])


def _probe(write: Write, cache: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Lattice, Lattice] | None:
    """The lattices of two parts with these shapes a token."""
    try:
        places = _places(write, cache, shapes)
    except Exception as error:  # Backends raise anything for a cache or a machine that they do not know.
        LOG.warning("The layout of a KV cache could not be probed: %s: %s", type(error).__name__, error)
        return None
    if places is None:
        return None
    first, second = (_all_blocks(lattice(part.cpu().numpy()), cache) for part in places)
    return None if first is None or second is None else (first, second)


def _all_blocks(found: Lattice | None, cache: torch.Tensor) -> Lattice | None:
    """The lattice of the scratch blocks, extended to all blocks of the cache."""
    stride = cache.stride(0) * cache.itemsize
    if found is None or found.axes[0] != (Axis(NUM_BLOCKS, stride),):
        return None
    blocks = (Axis(cache.shape[0], stride),) if cache.shape[0] > 1 else ()
    return found._replace(axes=(blocks, *found.axes[1:]))


def _places(write: Write, cache: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor] | None:
    """For each part `[blocks, tokens, ..]` the byte offsets of its elements. None if not each is found exactly once."""
    scratch = _scratch(cache)
    if scratch is None:
        return None
    block_tokens = cache.shape[-2]
    num_tokens = NUM_BLOCKS * block_tokens
    sizes = [num_tokens * prod(shape) for shape in shapes]
    slots = torch.arange(num_tokens, device=cache.device)

    def written(bits: torch.Tensor) -> torch.Tensor:
        """What the scratch blocks have after a write of these bits, which are those of all parts."""
        parts = bits.view(cache.dtype).split(sizes)
        scratch.fill_(_UNWRITTEN)
        write([part.view(num_tokens, *shape) for part, shape in zip(parts, shapes, strict=True)], scratch, slots)
        return scratch.view(bits.dtype).flatten()

    count = sum(sizes)
    numbers = _numbers(written, count, _BITS_OF[cache.dtype], cache.device)
    if numbers is None or int((numbers >= 0).sum()) != count or int(numbers.max()) >= count:
        return None
    # As many cells are written as there are elements. So each is found exactly once if none is missing. The last place
    # is for all cells that are not written.
    places = torch.full((count + 1,), -1, dtype=torch.int64, device=cache.device)
    places.scatter_(0, numbers.masked_fill_(numbers < 0, count).to(torch.int64), _offsets(scratch.shape, cache))
    if int(places[:count].min()) < 0:
        return None
    found = zip(places[:count].split(sizes), shapes, strict=True)
    return [part.view(NUM_BLOCKS, block_tokens, *shape) for part, shape in found]


def _numbers(
    written: Callable[[torch.Tensor], torch.Tensor], count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """The number of the element that lies in each cell. A negative one if nothing is written there."""
    # The digits are the low bits. The four bits above them are 0011: a normal number, whatever the digit is.
    digit_bits = dtype.itemsize * 8 - 4
    prefix, largest = 3 << digit_bits, (1 << digit_bits) - 1
    elements = torch.arange(count, dtype=torch.int32, device=device)
    numbers: torch.Tensor | None = None
    for shift in range(0, count.bit_length(), digit_bits):
        digits = written((((elements >> shift) & largest) + prefix).to(dtype)).to(torch.int32) - prefix
        if int(digits.max()) > largest:
            return None
        # An unwritten cell has a negative digit, and its sign bit stays set.
        numbers = digits if numbers is None else numbers | (digits << shift)
    return numbers


def _scratch(cache: torch.Tensor) -> torch.Tensor | None:
    """A few blocks with the strides of the cache. None for a dtype or a size that cannot be probed.

    If heads lie outside blocks, their stride spans all blocks of the cache. In the scratch it spans its own.
    """
    all_blocks = cache.shape[0] * cache.stride(0)
    strides = [NUM_BLOCKS * cache.stride(0) if stride == all_blocks else stride for stride in cache.stride()]
    shape = (NUM_BLOCKS, *cache.shape[1:])
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if cache.dtype not in _BITS_OF or length * cache.itemsize > MOST_SCRATCH_BYTES:
        return None
    return torch.empty(length, dtype=cache.dtype, device=cache.device).as_strided(shape, strides)


def _offsets(shape: Sequence[int], cache: torch.Tensor) -> torch.Tensor:
    """Byte offsets in the cache of all elements of its first blocks, in one row."""
    offsets = torch.zeros((), dtype=torch.int64, device=cache.device)
    for size, stride in zip(shape, cache.stride(), strict=True):
        offsets = offsets.unsqueeze(-1) + torch.arange(size, device=cache.device) * (stride * cache.itemsize)
    return offsets.flatten()
