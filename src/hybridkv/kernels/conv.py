"""Causal depthwise convolution over a packed step, with the last inputs of each request kept in pages.

Products are summed in float32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hybridkv.kernels.edges import Edges
from hybridkv.kernels.segments import Ones, SegmentTable

# On a CPU, so many bytes of a packed row at a time: they stay in its cache from the first product to the activation.
CPU_BLOCK_BYTES = 1 << 20


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, states: Tensor, table: SegmentTable
) -> Tensor:
    """x: [N, C], weight: [C, W], bias: [C], states: [pages, C, W - 1], the last inputs, oldest first -> [N, C]"""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"convolution with activation {activation!r}: know silu, swish and none")
    finish = _Finish(bias, activation)
    taps = weight.float().t().contiguous()  # [W, C]
    out = _whole_row(x, weight, taps, finish) if table.has_long else torch.empty_like(x)
    if table.has_long:
        _near(x, taps, finish, states, table.edges(weight.shape[1] - 1), out)
    if table.ones is not None:
        table.ones.put(finish(_one_token(x, taps, states, table.ones)), out)
    return table.blank(out)


class _Finish:
    """Bias and activation, in place."""

    def __init__(self, bias: Tensor | None, activation: str | None) -> None:
        self._bias = bias
        self._has_activation = activation is not None

    def __call__(self, y: Tensor) -> Tensor:
        """y: [..., C], float32"""
        if self._bias is not None:
            y += self._bias
        return functional.silu(y, inplace=True) if self._has_activation else y


def _one_token(x: Tensor, taps: Tensor, states: Tensor, ones: Ones) -> Tensor:
    x = ones.take(x)
    kept = ones.src.read(states).unbind(-1)  # W - 1 of [n, C], oldest first
    y = x * taps[-1]
    for before, tap in zip(kept, taps, strict=False):
        y += before * tap
    ones.dst.write(torch.stack([*kept[1:], x.to(states.dtype)], dim=-1), states)
    return y


def _whole_row(x: Tensor, weight: Tensor, taps: Tensor, finish: _Finish) -> Tensor:
    """As if the packed row were one span; its first `reach` tokens are left open."""
    num_tokens, channels = x.shape
    reach = len(taps) - 1
    if x.device.type == "cpu" and x.stride(0) == 1 and x.dtype == weight.dtype == torch.float32:
        # Channels one after another: what torch's own convolution is made for.
        y = functional.conv1d(x.t().unsqueeze(0), weight.unsqueeze(1), padding=reach, groups=channels)
        return finish(y[0, :, :num_tokens].t())
    out = torch.empty_like(x)
    block_tokens = max(1, CPU_BLOCK_BYTES // (4 * channels)) if x.device.type == "cpu" else num_tokens
    for first in range(reach, num_tokens, block_tokens):
        last = min(first + block_tokens, num_tokens)
        out[first:last] = finish(_shifted(x[first - reach : last].float(), taps))
    return out


def _near(x: Tensor, taps: Tensor, finish: _Finish, states: Tensor, edges: Edges, out: Tensor) -> None:
    """The tokens that see kept inputs, and what is kept."""
    reach = len(taps) - 1
    kept = edges.src.read(states).transpose(1, 2)  # [spans, reach, C]
    first = x.index_select(0, edges.first_rows).unflatten(0, (-1, reach))
    inputs = torch.cat([kept.to(x.dtype), first], dim=1)  # [spans, 2 * reach, C]
    y = finish(_shifted(inputs.transpose(0, 1).float(), taps)[:reach]).transpose(0, 1).flatten(0, 1)
    out.index_copy_(0, edges.near_rows, y.index_select(0, edges.near_places).to(out.dtype))
    for source, windows, dst in (
        (inputs.flatten(0, 1), edges.near_windows, edges.near_dst),
        (x, edges.far_windows, edges.far_dst),
    ):
        if dst.on_host:
            last = source.index_select(0, windows).unflatten(0, (-1, reach))
            dst.write(last.transpose(1, 2), states)


def _shifted(x: Tensor, taps: Tensor) -> Tensor:
    """x: [tokens, ..., C] -> [tokens - W + 1, ..., C]"""
    count = len(x) - len(taps) + 1
    y = x[:count] * taps[0]
    for i in range(1, len(taps)):
        y.addcmul_(x[i : i + count], taps[i])
    return y
