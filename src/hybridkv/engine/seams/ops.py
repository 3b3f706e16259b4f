"""The seams as operations that a compiler does not look into. Each finds its layer in the active frame, as ever.

They change pages, which the compiler knows nothing of. Nothing goes wrong by that: every result is used, so none is
left out, and what one of them reads of another's pages comes after it, since its own input does.

Each has two parts: the operation itself, whose result is contiguous with tokens first, and the function that models
call while they are traced, in the shape in which they call theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridkv.engine.seams import functions
from hybridkv.engine.seams.frame import current
from hybridkv.kernels.tokens import gather_tokens

_LIBRARY = torch.library.Library("hybridkv", "DEF")
_ops: Any = torch.ops.hybridkv


def operation(schema: str, fake: Callable[..., Any], run: Callable[..., Any]) -> None:
    """Define one. `fake`: results of the right shapes with nothing in them."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybridkv::{name}", fake, lib=_LIBRARY)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _ops.attend(query, key, value, s_aux, scale, softcap), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    frame = current()
    if not functions.keeps_latents(frame):
        functions.write(frame, key, value)
    return functions.attend(frame, frame.attention_layer, query, key, value, scale, softcap, sinks).contiguous()


operation(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, float? softcap) -> Tensor",
    lambda q, k, v, *_: q.new_empty(1, q.shape[2], q.shape[1], v.shape[-1]),
    _attend,
)


def _keep_latents(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """This step's latents [1, 1, N, D] -> those of every visible token [1, 1, K, D]."""
    layer, table = functions.write(current(), key, value)
    first, second = (gather_tokens(part, table) for part in layer.parts.values())  # [K, 1, D]
    return first.to(key.dtype).transpose(0, 1)[None].contiguous(), second.to(value.dtype).transpose(0, 1)[
        None
    ].contiguous()


def _latents_like(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return key.new_empty(1, 1, count, key.shape[-1]), value.new_empty(1, 1, count, value.shape[-1])


operation("keep_latents(Tensor key, Tensor value) -> (Tensor, Tensor)", _latents_like, _keep_latents)
keep_latents = _ops.keep_latents


# --- convolutions and scans -------------------------------------------------------------------------------------------


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any) -> Tensor:
    out: Tensor = _ops.conv(x, weight, bias, activation)
    return out.transpose(1, 2)


operation(
    "conv(Tensor x, Tensor weight, Tensor? bias, str? activation) -> Tensor",
    lambda x, *_: x.new_empty(1, x.shape[2], x.shape[1]),
    lambda *args: functions.conv(current(), *args).transpose(1, 2).contiguous(),
)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    out = _ops.gated_delta(q, k, v, g, beta, use_qk_l2norm_in_kernel)
    return out, out.new_empty(0)


def kimi_delta(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    out = _ops.kimi_delta(q, k, v, g, beta, use_qk_l2norm_in_kernel)
    return out, out.new_empty(0)


def _delta(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def operate(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool) -> Tensor:
        return run(current(), q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=l2norm)[0].contiguous()

    return operate


for _name, _run in (("gated_delta", functions.gated_delta), ("kimi_delta", functions.kimi_delta)):
    operation(
        f"{_name}(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool l2norm) -> Tensor",
        lambda q, k, v, *_: q.new_empty(v.shape),
        _delta(_run),
    )


def mamba2(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,  # noqa: N803  (as models name it)
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    assert z is None, "no family gates inside the scan"
    out = _ops.mamba2(x, dt, a, b, c, D, dt_bias, dt_softplus, *dt_limit)
    return out, out.new_empty(0)


operation(
    "mamba2(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, bool softplus, float low,"
    " float high) -> Tensor",
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
    lambda x, dt, a, b, c, d, dt_bias, softplus, low, high: functions.mamba2(
        current(), x, dt, a, b, c, D=d, dt_bias=dt_bias, dt_softplus=softplus, dt_limit=(low, high)
    )[0].contiguous(),
)


def mamba1(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    out = _ops.mamba1(x, dt, a, b, c, D, z, delta_bias, delta_softplus)
    return out.transpose(1, 2), out.new_empty(0)


operation(
    "mamba1(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? dt_bias, bool softplus)"
    " -> Tensor",
    lambda x, *_: x.new_empty(1, x.shape[2], x.shape[1]),
    lambda *args: functions.mamba1(current(), *args)[0].transpose(1, 2).contiguous(),
)

operation(
    "lightning(Tensor q, Tensor k, Tensor v, Tensor slope) -> Tensor",
    lambda q, *_: q.new_empty(q.shape),
    lambda *args: functions.lightning_scan(current(), *args).contiguous(),
)


def lightning(mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return functions.around_lightning(mixer, hidden_states, _ops.lightning), None
