"""Causal depthwise convolution over a packed step, with the last inputs of each request kept in pages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hybridkv.kernels.edges import Edges
from hybridkv.kernels.segments import Ones, SegmentTable


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, states: Tensor, table: SegmentTable
) -> Tensor:
    """x: [N, C], weight: [C, W], bias: [C], states: [pages, C, W - 1], the last inputs, oldest first -> [N, C]"""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"convolution with activation {activation!r}: know silu, swish and none")
    ones = None if table.ones is None else _one_token(x, weight, bias, states, table.ones)
    if table.has_long:
        y = _long(x, weight, bias, states, table.edges(weight.shape[1] - 1))
        if ones is not None and table.ones is not None:
            long_tokens = table.edges(weight.shape[1] - 1).tokens
            y = torch.empty_like(x, dtype=y.dtype).index_copy_(0, long_tokens, y).index_copy_(0, table.ones.rows, ones)
    else:
        y = ones
    return (y if activation is None else functional.silu(y)).to(x.dtype)


def _one_token(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, ones: Ones) -> Tensor:
    # inputs: [n, C, W]
    inputs = torch.cat([states.index_select(0, ones.src), ones.take(x).unsqueeze(-1).to(states.dtype)], dim=-1)
    states.index_copy_(0, ones.dst, inputs[..., 1:])
    y = torch.linalg.vecdot(inputs.float(), weight.float())
    return (y if bias is None else y + bias).to(weight.dtype)


def _long(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, edges: Edges) -> Tensor:
    reach = weight.shape[1] - 1
    # inputs: [slots, C], the kept inputs of each span before its tokens
    inputs = x.new_empty(edges.num_slots, x.shape[1])
    before = states.index_select(0, edges.src).transpose(1, 2)
    inputs.index_copy_(0, edges.src_slots, before.flatten(0, 1).to(x.dtype))
    inputs.index_copy_(0, edges.token_slots, x if edges.tokens is None else x.index_select(0, edges.tokens))
    after = inputs.index_select(0, edges.dst_slots).unflatten(0, (-1, reach))
    states.index_copy_(0, edges.dst, after.transpose(1, 2).to(states.dtype))
    y = _shifted(inputs, weight, bias)
    return y.index_select(0, edges.token_slots - reach).to(weight.dtype)


def _shifted(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs: [slots, C] -> [slots - W + 1, C]"""
    width = weight.shape[1]
    count = inputs.shape[0] - width + 1
    taps = weight.float().t().contiguous()
    y = torch.mul(inputs[:count], taps[0])
    for i in range(1, width):
        y.addcmul_(inputs[i : i + count], taps[i])
    return y if bias is None else y.add_(bias)
