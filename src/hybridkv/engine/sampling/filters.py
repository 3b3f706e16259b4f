"""Token filters: min-p, top-k and top-p, with parameters for each row. Works on tensors and knows no requests.

The order is vLLM's: min-p on the whole distribution, top-k on the tokens that min-p keeps, top-p on the renormalized
distribution of the tokens that top-k keeps. A filter is a threshold: tokens exactly as likely as the last kept one are
kept, too, so that the result does not depend on how a sort orders ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridkv.engine.sampling.params import SamplingParams


def keep_likely(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set the scores of filtered tokens to minus infinity, in place. Scores are logits divided by temperature.

    `params`: one for each row. The result of a row does not depend on other rows.
    """
    # scores: [S, V]
    if any(p.min_p > 0 for p in params):
        floors = torch.tensor([p.min_p for p in params], dtype=scores.dtype).log().to(scores.device)
        scores = mask_below(scores, scores.amax(dim=-1) + floors)
    vocab_size = scores.shape[1]
    cut = [index for index, p in enumerate(params) if p.top_p < 1 or 0 < p.top_k < vocab_size]
    if not cut:
        return scores
    top_k = [params[index].top_k if 0 < params[index].top_k < vocab_size else 0 for index in cut]
    top_p = [params[index].top_p for index in cut]
    if len(cut) == len(params):
        return mask_below(scores, thresholds(scores, top_k, top_p))
    rows = torch.tensor(cut).to(scores.device)
    some = scores[rows]
    scores[rows] = mask_below(some, thresholds(some, top_k, top_p))
    return scores


def mask_below(scores: Tensor, floor: Tensor) -> Tensor:
    # scores: [S, V], floor: [S]
    return scores.masked_fill_(scores < floor[:, None], -torch.inf)


def thresholds(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """The lowest score that top-k and then top-p keep in each row. 0 as top_k: all; 1 as top_p: all."""
    # scores: [S, V] -> [S]
    device, vocab_size = scores.device, scores.shape[1]
    nucleus = torch.tensor(top_p, dtype=scores.dtype).to(device)
    width, log_total = max(top_k), None
    if not all(top_k):
        log_total = scores.logsumexp(dim=-1)  # [S]
        width = max(width, _widest_nucleus(scores, log_total, nucleus, top_k))
    # A partial sort where the candidates are few: on a CPU it is ten times cheaper than a whole one.
    few = width * 4 < vocab_size
    head = scores.topk(width, dim=-1).values if few else scores.sort(dim=-1, descending=True).values
    # head: [S, W], best first
    ranks = torch.arange(head.shape[1], device=device)
    limit = torch.tensor([k or head.shape[1] for k in top_k]).to(device)
    head = head.masked_fill(ranks >= limit[:, None], -torch.inf)
    log_head = head.logsumexp(dim=-1)
    if log_total is not None:  # without top-k, the head is not the whole distribution
        log_head = torch.where(torch.tensor([k > 0 for k in top_k]).to(device), log_head, log_total)
    shares = (head - log_head[:, None]).exp()
    before = shares.cumsum(dim=-1) - shares  # probability of the tokens that are likelier
    kept = (before < nucleus[:, None]) | (nucleus[:, None] >= 1)
    kept &= ranks < limit[:, None]
    last = kept.sum(dim=-1).clamp_min(1) - 1
    return head.gather(1, last[:, None]).squeeze(1)


def _widest_nucleus(scores: Tensor, log_total: Tensor, nucleus: Tensor, top_k: Sequence[int]) -> int:
    """Upper bound on the number of tokens that top-p keeps, over the rows without top-k.

    Tokens less likely than (1 - p) / V sum to less than 1 - p, so none is in the nucleus. Half of that threshold
    is used to allow for rounding. Few tokens remain; the cost is one synchronization with the device.
    """
    rare = ((1 - nucleus) / (2 * scores.shape[1])).log() + log_total  # [S]
    counts = (scores >= rare[:, None]).sum(dim=-1)
    counts *= torch.tensor([k == 0 for k in top_k]).to(scores.device)
    return int(counts.max().clamp_min(1))
