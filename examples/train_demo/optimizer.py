"""Muon for the matrices inside layers, Adam for everything else, and their state in few bytes.

Muon (momentum whose step is made orthogonal) needs half the steps that Adam needs on a model of this size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon trains it: the large matrices of layers."""
    return name.startswith("model.layers.") and weight.dim() == 2 and min(weight.shape) > 64


def orthogonal(x: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: five Newton-Schulz steps. x: [n, rows, columns]

    On a GPU in bfloat16, which is enough and faster.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.bfloat16() if x.is_cuda else x.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    def __init__(self, weights: Weights, matrix_rate: float, embed_rate: float, head_rate: float, small_rate: float):
        self.weights = weights
        self.matrix_rate = matrix_rate
        self.rates = {"model.embed_tokens.weight": embed_rate, "lm_head.weight": head_rate}
        self.small_rate = small_rate
        self.shapes: dict[torch.Size, list[str]] = {}
        for name, weight in weights.items():
            if is_matrix(name, weight):
                self.shapes.setdefault(weight.shape, []).append(name)
        self.others = [name for name, weight in weights.items() if not is_matrix(name, weight)]
        self.first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: torch.zeros_like(weights[name]) for name in self.others}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, grads: Weights, scale: float, steps_taken: int) -> None:
        """`scale`: where the schedule of learning rates stands, 0 to 1. `steps_taken`: since the moments were zero."""
        for shape, names in self.shapes.items():
            gradients = [grads[name] for name in names]
            momenta = [self.first[name] for name in names]
            torch._foreach_lerp_(momenta, gradients, 0.05)
            ahead = torch._foreach_lerp(gradients, momenta, 0.95)
            update = orthogonal(torch.stack(list(ahead))).float()
            rate = scale * self.matrix_rate * max(1.0, shape[0] / shape[1]) ** 0.5
            matrices = [self.weights[name] for name in names]
            torch._foreach_mul_(matrices, 1 - rate * 0.01)
            torch._foreach_add_(matrices, list(update.unbind()), alpha=-rate)
        beta1, beta2 = 0.9, 0.98
        gradients = [grads[name] for name in self.others]
        first, second = [self.first[n] for n in self.others], [self.second[n] for n in self.others]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        size = torch._foreach_sqrt(second)
        torch._foreach_mul_(size, (1 - beta2**steps_taken) ** -0.5)
        torch._foreach_add_(size, 1e-10)
        update_small = torch._foreach_div(first, size)
        rates = [-scale * self.rates.get(n, self.small_rate) / (1 - beta1**steps_taken) for n in self.others]
        torch._foreach_mul_(update_small, rates)
        torch._foreach_add_([self.weights[n] for n in self.others], update_small)


def pack(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Moments in 8 bits: rows in float8, each with a scale."""
    packed = {}
    for name, tensor in tensors:
        rows = tensor.reshape(tensor.shape[0], -1)
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 448
        packed[f"{name}|8"], packed[f"{name}|scale"] = (rows / scale).to(torch.float8_e4m3fn), scale
    return packed


def unpack(packed: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    rows = packed[f"{name}|8"].to(like.device).float() * packed[f"{name}|scale"].to(like.device)
    return rows.reshape(like.shape)


def pack_weights(weights: Weights) -> dict[str, Tensor]:
    """Weights in 24 bits: float32 without the last byte, which is noise."""
    return {
        name: w.cpu().contiguous().view(torch.uint8).reshape(-1, 4)[:, 1:].contiguous() for name, w in weights.items()
    }


def unpack_weight(packed: Tensor, like: Tensor) -> Tensor:
    whole = torch.zeros(packed.shape[0], 4, dtype=torch.uint8)
    whole[:, 1:] = packed
    return whole.view(torch.float32).reshape(like.shape).to(like.device)
