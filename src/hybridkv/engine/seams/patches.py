"""Puts our functions in the place of those that transformers' modeling files define, once a process.

Each patched name still calls the stock function unless this thread is running an engine's step: other models of the
same kind, in the same process, are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from hybridkv.engine.seams import functions, ops
from hybridkv.engine.seams.frame import active, tracing
from hybridkv.errors import ConfigError

ATTENTION = "hybridkv_paged"
"""Our attention's name. Transformers builds no mask for a name it has no mask function for."""


class Ours(NamedTuple):
    """What stands in for a function of a modeling file."""

    run: Callable[..., Any]
    """Takes the frame first."""
    trace: Callable[..., Any]
    """What a compiler sees of it."""


FUNCTIONS: dict[str, Ours] = {
    "causal_conv1d_fn": Ours(functions.conv, ops.conv),
    "torch_chunk_gated_delta_rule": Ours(functions.gated_delta, ops.gated_delta),
    "chunk_kimi_delta_attention": Ours(functions.kimi_delta, ops.kimi_delta),
    "mamba2_chunk_scan": Ours(functions.mamba2, ops.mamba2),
    "mamba_selective_scan": Ours(functions.mamba1, ops.mamba1),
}
"""Names at the top of modeling files. Their one-token siblings are never called: models are told there is no past."""

METHODS: dict[tuple[str, str], Ours] = {
    ("MiniMaxLightningAttention", "forward"): Ours(functions.lightning, ops.lightning)
}
"""Methods of classes, where a mixer calls no function."""


def attach(model: PreTrainedModel) -> None:
    """Let a model run packed steps. It cannot be used outside an engine any more: its attention reads pages."""
    AttentionInterface.register(ATTENTION, _attention)
    try:
        model.set_attn_implementation(ATTENTION)
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} does not let its attention be chosen: {error}") from error
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        _patch(module)


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return ops.attention(*args, **kwargs) if tracing() else functions.attention(*args, **kwargs)


def _patch(module: ModuleType) -> None:
    for name, ours in FUNCTIONS.items():
        if hasattr(module, name):
            _replace(module, name, ours)
    for (owner, name), ours in METHODS.items():
        if hasattr(module, owner):
            _replace(getattr(module, owner), name, ours)


def _replace(owner: Any, name: str, ours: Ours) -> None:
    stock = getattr(owner, name)
    if getattr(stock, "hybridkv_stock", None) is not None:
        return

    @wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tracing():
            return ours.trace(*args, **kwargs)
        frame = active()
        return stock(*args, **kwargs) if frame is None else ours.run(frame, *args, **kwargs)

    call.hybridkv_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, call)
