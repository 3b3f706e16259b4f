"""Replaces functions of transformers' modeling files with ours, once a process.

Each patched name still calls the stock function unless this thread is running an engine's step, so other models of the
same kind in the same process are not affected.
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
"""Name of our attention. It has no mask function, so transformers builds no mask for it."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": functions.conv,
    "torch_chunk_gated_delta_rule": functions.gated_delta,
    "chunk_kimi_delta_attention": functions.kimi_delta,
    "mamba2_chunk_scan": functions.mamba2,
    "mamba_selective_scan": functions.mamba1,
}
"""Module-level names of modeling files. Their one-token variants are never called: models are told there is no past."""

METHODS: dict[tuple[str, str], Callable[..., Any]] = {("MiniMaxLightningAttention", "forward"): functions.lightning}
"""Methods of classes, for mixers that call no function."""


def attach(model: PreTrainedModel) -> None:
    """Make a model run packed steps. It can then only be used by an engine, because its attention reads pages."""
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
