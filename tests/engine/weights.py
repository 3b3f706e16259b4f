"""Random weights under which a tiny model depends on everything its cache holds, and on nothing by a hair.

Fresh transformers weights are so small that a model hardly notices its own state, and a test that loses the state
passes. Here projections keep the scale of what they read, decays are slow enough to remember a hundred tokens, and
logits are spread, yet sums stay small enough that float32 agrees with float64. Parameters are known by their names
alone: nothing here knows a family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

Fill = Callable[[Any, torch.Generator], Any]
"""The new value of a parameter, from the old one (its shape, its neutral value) and a source of chance."""


def _scaled(gain: float) -> Fill:
    """Outputs about `gain` times as large as inputs."""

    def fill(old: Any, chance: torch.Generator) -> Any:
        return torch.randn(old.shape, generator=chance) * (gain / old.shape[-1] ** 0.5)

    return fill


def _normal(std: float, mean: float = 0.0) -> Fill:
    return lambda old, chance: mean + std * torch.randn(old.shape, generator=chance)


def _around_old(std: float) -> Fill:
    """Norm weights: some families store the factor, some the factor less one."""
    return lambda old, chance: old.float().mean().round() + std * torch.randn(old.shape, generator=chance)


def _log_uniform(low: float, high: float) -> Fill:
    """The logarithm of a value spread evenly over its orders of magnitude."""
    span = torch.tensor([low, high]).log()
    return lambda old, chance: span[0] + (span[1] - span[0]) * torch.rand(old.shape, generator=chance)


def _softplus_inverse(low: float, high: float) -> Fill:
    """What softplus turns into a value between `low` and `high`."""
    log_of = _log_uniform(low, high)
    return lambda old, chance: torch.expm1(log_of(old, chance).exp()).log()


BRANCH_END = r"(o_proj|out_proj|down_proj|output_linear|w2)(\.weight)?$|post_\w+norm\.weight$"
LOGIT_STD = 0.2  # of the weights that make logits; the norm before them makes this a spread of about 1.6

_LEARNED_BUFFERS = r"(e_score_correction|expert)_bias$"

# The first pattern found in a name wins. A token decays the past by exp(-exp(A_log) * softplus(dt + dt_bias)). A delta
# rule writes with beta, so dt may be small; Mamba writes with dt itself, so there the A is small instead.
_MAMBA = r"(mamba|mixer)\."
_RULES: list[tuple[str, Fill]] = [
    (_MAMBA + r"(.*\.)?A_log$", _log_uniform(0.01, 0.08)),
    (_MAMBA + r"(dt_bias|dt_proj\.bias)$", _softplus_inverse(0.1, 0.5)),
    (_MAMBA + r"D$", _normal(0.2)),
    (r"A_log$", _log_uniform(0.5, 4.0)),
    (r"dt_bias$", _softplus_inverse(1e-3, 5e-3)),
    (r"(conv1d|conv\.conv)\.weight$", _normal(0.5)),
    (r"sinks$", _normal(0.7, mean=1.0)),
    (r"altup\.\w+_coefs\.weight$", _normal(0.1)),
    (r"correct_output_scale$", _normal(0.2, mean=0.5)),
    (_LEARNED_BUFFERS, _normal(0.1)),
    (r"\.(router|gate)\.weight$", _scaled(2.0)),
    (r"router\.(scale|per_expert_scale)$", _around_old(0.2)),
    (r"norm\w*\.weight$", _around_old(0.1)),
    (r"lm_head\.weight$", _normal(LOGIT_STD)),
    (r"embed\w*\.weight$", _normal(1.0)),
    (r"\.(q_proj|k_proj|q_b_proj)\.weight$", _scaled(1.5)),
    (r"(o_proj|out_proj|down_proj|output_linear|w2)(\.weight)?$", _scaled(0.3)),
    (r"bias$", _normal(0.2)),
    (r"", _scaled(1.0)),
]


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters, each once however often it is shared, and the learned tensors that are stored as buffers."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if re.search(_LEARNED_BUFFERS, name))


def fill_weights(model: Any, seed: int, branch_scale: float = 1.0) -> None:
    """Replace every weight of `model` (float32, CPU): the same model and seed always give the same weights.

    `branch_scale` is for models whose branches are loud beside what they are added to: chaos is noise in float32.
    """
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in _tensors(model):
            fill = next(fill for pattern, fill in _RULES if re.search(pattern, name))
            tensor.copy_(fill(tensor, chance) * (branch_scale if re.search(BRANCH_END, name) else 1.0))
        if (tied := model.get_input_embeddings().weight) is model.get_output_embeddings().weight:
            tied.mul_(LOGIT_STD)
