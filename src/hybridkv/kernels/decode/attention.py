"""Attention of a decoding step over pages, and the writing of its tokens. It is `kernels.attention` in Triton."""

from __future__ import annotations

from torch import Tensor

from hybridkv.kernels.decode.attention_kernels import write_kernel
from hybridkv.kernels.decode.launch import Launch, padded, tile_size
from hybridkv.kernels.decode.paged import Part, Softmax, attend_pages
from hybridkv.kernels.decode.tables import DecodeTokens

_WRITTEN_AT_ONCE = 4096
"""Elements of a row that one program writes, at most."""


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: DecodeTokens,
    *,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """query: [B, Hq, D], keys: [P, T, H, D], values: [P, T, H, Dv] -> [B, Hq, Dv]. The step's own keys are written.

    Padding gives zeros. launch: chosen by the shapes unless it is passed.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    dim, main = keys.shape[-1], _main_dim(keys.shape[-1])
    rest = Part(query[..., main:], keys[..., main:]) if main < dim else None
    return attend_pages(
        Part(query[..., :main], keys[..., :main]), rest, values, table, Softmax(scale, sinks, softcap), launch
    )


def _main_dim(dim: int) -> int:
    """Where keys are cut in two. The first part is a power of two, and the second is small: both are tiles."""
    half = tile_size(dim) // 2
    return half if half < dim and padded(dim - half) < half else dim


def write_tokens(keys: Tensor, values: Tensor, table: DecodeTokens, key: Tensor, value: Tensor) -> None:
    """Put the step's tokens in their pages, all but padding.

    keys: [P, T, H, D], values: [P, T, H, Dv], key: [B, H, D], value: [B, H, Dv]
    """
    num_rows, num_heads, dim = key.shape
    value_dim = value.shape[-1]
    dim_tile, value_tile = tile_size(dim), tile_size(value_dim)
    block_heads = min(tile_size(num_heads), max(1, _WRITTEN_AT_ONCE // max(dim_tile, value_tile)))
    write_kernel[(-(-num_heads // block_heads), num_rows)](
        keys, values, key, value, table.positions, table.pages, table.shape,
        keys.stride(), values.stride(), key.stride(), value.stride(),
        page_tokens=table.block_tokens, num_heads=num_heads, dim=dim, value_dim=value_dim,
        dim_tile=dim_tile, value_tile=value_tile, block_heads=block_heads,
    )  # fmt: skip
