"""Attention between dense tensors, with what torch's own lacks: sinks, soft caps, heads of two sizes.

Where torch has a fused kernel that can say its normalizer, sinks are applied to its result; the rest is spelled out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

EXPLICIT_SCORES = 1 << 24
"""Scores that spelled-out attention holds at a time: 64 MiB."""

_CUDA_TILE = 64
"""Queries that torch's memory-efficient attention takes at a time. With a mask and one query left over, that one's
result is wrong (seen with torch 2.11, float32): such a query gets a twin."""


class Extras(NamedTuple):
    """What shapes the softmax."""

    scale: float
    sinks: torch.Tensor | None
    """[Hq], or laid out like the queries: one more logit a head, in the denominator only."""
    softcap: float | None
    """Scores are squeezed into (-softcap, softcap) before they are masked."""


def is_fused(extras: Extras, device: torch.device) -> bool:
    """Whether a fused kernel does it, and so no scores are held."""
    return extras.softcap is None and (extras.sinks is None or device.type == "cpu")


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    extras: Extras,
) -> torch.Tensor:
    """query: [B, H, Q, D], key: [B, H or 1, L, D], value: [B, H or 1, L, Dv] -> [B, H, Q, Dv].

    The mask is added to the scores, the sinks are [B, H, Q]; both are broadcast. `is_causal` needs `is_fused`.
    """
    if not is_fused(extras, query.device):
        return _spelled_out(query, key, value, mask, extras)
    value_dim = value.shape[-1]
    # Fused kernels want heads of one size, and padding costs less than doing without them.
    width = max(key.shape[-1], value_dim)
    query, key, value = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (query, key, value))
    key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    num_queries = query.shape[2]
    if mask is not None and query.device.type == "cuda" and num_queries % _CUDA_TILE == 1 < num_queries:
        query, mask = (torch.cat([x, x[..., -1:, :]], -2) for x in (query, mask))
    if extras.sinks is None:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=extras.scale
        )[:, :, :num_queries]
    else:
        output = _with_sinks(query, key, value, mask, is_causal, extras.scale, extras.sinks)
    return output[..., :value_dim]


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """A sink takes its share of the weights: exp(sink) / (exp(sink) + sum of exp(scores))."""
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return output * torch.sigmoid(logsumexp - sinks.float())[..., None].to(output.dtype)


def _spelled_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, extras: Extras
) -> torch.Tensor:
    batch, num_heads, num_queries, _ = query.shape
    rows = max(1, EXPLICIT_SCORES // (batch * num_heads * key.shape[2]))
    parts = []
    for first in range(0, num_queries, rows):
        part = query[:, :, first : first + rows]
        part_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., first : first + rows, :]
        sinks = extras.sinks
        if sinks is not None and sinks.shape[-1] > 1:
            sinks = sinks[..., first : first + rows]
        parts.append(_few_rows(part, key, value, part_mask, extras._replace(sinks=sinks)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _few_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, extras: Extras
) -> torch.Tensor:
    scores = (_by_shared_heads(query * extras.scale, key.transpose(-1, -2))).float()
    if extras.softcap is not None:
        scores = scores.div_(extras.softcap).tanh_().mul_(extras.softcap)
    if mask is not None:
        scores = scores + mask
    if extras.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = extras.sinks.float()[..., None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return _by_shared_heads(weights.to(query.dtype), value)


def _by_shared_heads(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right where the heads of left may share one of right: [B, H, Q, X] @ [B, H or 1, X, Y]."""
    if left.shape[1] == right.shape[1]:
        return left @ right
    return (left.flatten(1, 2) @ right[:, 0]).unflatten(1, left.shape[1:3])
