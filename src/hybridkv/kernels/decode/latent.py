"""Multi-head latent attention of a decoding step, over pages of latents that are never expanded.

A head's keys are `expand_keys @ latent`, and its values `expand_values @ latent`. The first goes into the query, and
the second is applied to the sum of latents: all heads then share one KV head, whose values are its keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridkv.kernels.decode.launch import Launch
from hybridkv.kernels.decode.paged import Part, Softmax, attend_pages
from hybridkv.kernels.decode.tables import DecodeTokens


def attend_latents(
    query: Tensor,
    latents: Tensor,
    rotary: Tensor,
    table: DecodeTokens,
    expand: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """query: [B, Hq, Dn + Dr], latents: [P, T, 1, R], rotary: [P, T, 1, Dr], expand: [Hq * (Dn + Dv), R]
    -> [B, Hq, Dv]

    The last `Dr` elements of a query meet `rotary`. Of each head `expand` has Dn rows for keys, then Dv for values.
    """
    num_queries, plain_dim = query.shape[1], query.shape[2] - rotary.shape[-1]
    by_head = expand.view(num_queries, -1, expand.shape[-1])
    folded = torch.einsum("bhd,hdr->bhr", query[..., :plain_dim], by_head[:, :plain_dim])
    turned = query[..., plain_dim:]
    main = Part(_rows(folded), latents)
    rest = Part(_rows(turned), rotary) if rotary.shape[-1] else None
    gathered = attend_pages(main, rest, None, table, Softmax(scale, sinks, softcap), launch)
    return torch.einsum("bhr,hvr->bhv", gathered, by_head[:, plain_dim:])


def _rows(query: Tensor) -> Tensor:
    return query if query.stride(-1) == 1 else query.contiguous()
