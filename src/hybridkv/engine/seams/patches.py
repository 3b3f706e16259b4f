"""Puts our functions in the place of those that transformers' modeling files define, once a process.

Each patched name still calls the stock function unless this thread is running an engine's step: other models of the
same kind, in the same process, are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from transformers import AttentionInterface, PreTrainedModel

from hybridkv.engine.seams import functions
from hybridkv.engine.seams.frame import is_running
from hybridkv.errors import ConfigError

ATTENTION = "hybridkv_paged"
"""Our attention's name. Transformers builds no mask for a name it has no mask function for."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": functions.conv,
    "torch_chunk_gated_delta_rule": functions.gated_delta,
    "chunk_kimi_delta_attention": functions.kimi_delta,
    "mamba2_chunk_scan": functions.mamba2,
    "mamba_selective_scan": functions.mamba1,
}
"""Names at the top of modeling files. Their one-token siblings are never called: models are told there is no past."""

METHODS: dict[tuple[str, str], Callable[..., Any]] = {("MiniMaxLightningAttention", "forward"): functions.lightning}
"""Methods of classes, where a mixer calls no function."""


def attach(model: PreTrainedModel) -> None:
    """Let a model run packed steps. It cannot be used outside an engine any more: its attention reads pages."""
    AttentionInterface.register(ATTENTION, functions.attention)
    try:
        model.set_attn_implementation(ATTENTION)
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} does not let its attention be chosen: {error}") from error
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        _patch(module)


def _patch(module: ModuleType) -> None:
    for name, ours in FUNCTIONS.items():
        if hasattr(module, name):
            _replace(module, name, ours)
    for (owner, name), ours in METHODS.items():
        if hasattr(module, owner):
            _replace(getattr(module, owner), name, ours)


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    stock = getattr(owner, name)
    if getattr(stock, "hybridkv_stock", None) is not None:
        return

    @wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if is_running() else stock(*args, **kwargs)

    call.hybridkv_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, call)
