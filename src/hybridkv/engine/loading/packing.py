"""Packs the weights of a CPU model into the layout of the CPU's matrix units, once.

Plain bfloat16 weights are reordered into that layout in every call. With few tokens, as in decode, that takes as long
as the product itself. Plain float32 products use BLAS, and OpenBLAS, which ARM builds have, takes as long for 2 tokens
as for 8. Only models that the engine loaded itself are packed: their plain weights are freed.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Sequence
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridkv.engine.loading.host import has_bfloat16
from hybridkv.engine.loading.quantization import is_quantized
from hybridkv.engine.seams.ops import operation

_TYPICAL_TOKENS = 16
"""Number of rows that the layout is optimized for. Other numbers work, too; small ones gain most."""

READ_ELSEWHERE = frozenset({"dt_proj"})
"""Linear layers whose weights some mixer reads directly."""

_COPY_SHARE = 8
"""A head that shares its weight with the embedding gets a packed copy if that is at most 1/8 of the model's size."""

_NUMBERS = itertools.count()
_EXPERTS: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""Experts by number: operations take tensors, not modules, and a hundred weights are too many to pass."""


def can_pack(model: PreTrainedModel, *, is_alone: bool = False) -> bool:
    """Whether packing makes the model faster. `is_alone`: decode steps have a single token."""
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available() or is_quantized(model):
        return False
    if model.dtype == torch.bfloat16:
        return has_bfloat16()
    # A single token is a matrix-vector product. OpenBLAS runs it at memory bandwidth, faster than oneDNN.
    return model.dtype == torch.float32 and platform.machine() == "aarch64" and not is_alone


def pack_weights(model: PreTrainedModel) -> None:
    """Pack linear layers and experts in place. The model can still be run, but no longer be saved."""
    limit = sum(parameter.nbytes for parameter in model.parameters()) // _COPY_SHARE
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    too_large = {id(weight) for weight in embeddings if weight.nbytes > limit}  # lookups need the plain weight, too
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # by weight: layers may share weights
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and name not in READ_ELSEWHERE and id(child.weight) not in too_large:
                places.setdefault(id(child.weight), []).append((parent, name))
    for sharing in places.values():  # each plain weight is freed before the next is packed
        packed = _pack(getattr(*sharing[0]).weight)
        for parent, name in sharing:
            setattr(parent, name, PackedLinear(getattr(parent, name), packed))
    if model.dtype == torch.bfloat16:  # experts get a token or two, for which plain float32 is faster
        for module in model.modules():
            if _are_plain_experts(module):
                _pack_experts(module)


def _pack_experts(experts: Any) -> None:
    experts.packed_up = [_pack(weight) for weight in experts.gate_up_proj]
    experts.packed_down = [_pack(weight) for weight in experts.down_proj]
    experts.gate_up_proj = experts.down_proj = None
    experts.forward = MethodType(_experts, experts)
    experts.number = torch.tensor(next(_NUMBERS))
    _EXPERTS[int(experts.number)] = experts


class PackedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer with a packed weight, which only `_product` can read."""

    def __init__(self, linear: nn.Linear, packed: Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.packed = _pack(linear.weight) if packed is None else packed
        self.weight = linear.weight.detach().new_empty(0)  # some models read its dtype

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.packed, self.bias)


def _pack(weight: Tensor) -> Tensor:
    # weight: [out, in]
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _TYPICAL_TOKENS)
    return packed


@operation(
    "packed_product(Tensor x, Tensor packed, Tensor? bias) -> Tensor",
    lambda x, packed, bias: x.new_empty(*x.shape[:-1], packed.shape[0]),
)
def _product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


def _are_plain_experts(module: Any) -> bool:
    """A stack of gated experts, as transformers keeps them: `[experts, out, in]`, without biases."""
    return (
        getattr(module, "has_gate", False)
        and not module.has_bias
        and not module.is_transposed
        and not getattr(module, "has_post_expert_norm", False)
        and isinstance(module.gate_up_proj, nn.Parameter)
    )


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts one after another, each on its own tokens. All but the products is done for all at once.

    hidden_states: [N, D], top_k_*: [N, K] -> [N, D]
    """
    if torch.compiler.is_dynamo_compiling():
        named: Tensor = _numbered_experts(self.number, hidden_states, top_k_index, top_k_weights)
        return named
    num_choices = top_k_index.shape[-1]
    chosen, order = top_k_index.flatten().sort()
    counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
    rows = hidden_states.index_select(0, order // num_choices)
    outputs = _each(self._apply_gate(_each(rows, self.packed_up, counts)), self.packed_down, counts)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    weighted = outputs.index_select(0, places).unflatten(0, (-1, num_choices)) * top_k_weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden_states.dtype)


def _each(rows: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Multiply consecutive groups of rows with one weight each. `counts`: number of rows in each group."""
    parts = zip(rows.split(counts), weights, counts, strict=True)
    return torch.cat([_product(part, weight) for part, weight, count in parts if count])


@operation(
    "packed_experts(Tensor number, Tensor rows, Tensor chosen, Tensor weights) -> Tensor",
    lambda number, rows, chosen, weights: rows.new_empty(rows.shape),
)
def _numbered_experts(number: Tensor, *args: Tensor) -> Tensor:
    return _experts(_EXPERTS[int(number.item())], *args)
