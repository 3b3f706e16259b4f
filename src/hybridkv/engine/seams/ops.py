"""Operations of the seams on pages.

Tokens are the first axis, there is no batch axis, and the active frame has the layer.

A plain call runs an operation at once. A compiler sees only its schema, and a fake that makes results of the right
shapes. Both are declared next to the implementation.

Operations change pages, and the compiler does not know it. That is safe: every result is used, so no operation is
removed, and an operation that reads pages of another runs after it, because its input depends on the other's result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hybridkv.engine.seams.frame import current
from hybridkv.errors import ConfigError
from hybridkv.kernels.decode.tables import DecodeStates, DecodeTokens
from hybridkv.kernels.registry import kernel
from hybridkv.kernels.segments import SegmentTable
from hybridkv.kernels.tokens import TokenTable, gather_tokens
from hybridkv.memory import LayerMemory
from hybridkv.spec import LatentAttention

_LIBRARY = torch.library.Library("hybridkv", "DEF")


def operation(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as one operation for compilers. `fake`: returns contiguous results of the right shapes."""
    name = schema.partition("(")[0]

    def define(run: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
        _LIBRARY.impl(name, lambda *args: _results(run(*args), args), "CompositeExplicitAutograd")
        torch.library.register_fake(f"hybridkv::{name}", fake, lib=_LIBRARY)
        traced = getattr(torch.ops.hybridkv, name)

        @wraps(run)
        def call(*args: Any) -> Any:
            return traced(*args) if torch.compiler.is_dynamo_compiling() else run(*args)

        return call

    return define


def _results(found: Any, args: tuple[Any, ...]) -> Any:
    """Contiguous results, none of which is an argument: the schemas say so, and compilers rely on it."""
    if isinstance(found, tuple):
        return tuple(_results(one, args) for one in found)
    return found.clone() if any(found is arg for arg in args) else found.contiguous()


# --- attention --------------------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keeps_latents() -> bool:
    """Whether the layer's attention caches latents instead of keys and values. The same for all layers of a graph."""
    frame = current()
    return isinstance(frame.memory.attention(frame.attention_layer).spec, LatentAttention)


@operation(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, float? softcap, Tensor? expand) -> Tensor",
    lambda q, k, v, *_: q.new_empty(*q.shape[:2], v.shape[-1]),
)
def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, expand: Tensor | None
) -> Tensor:
    """q: [N, Hq, D], k, v: this step's, [N, H, D], which are written first -> [N, Hq, Dv]

    Latents are already written: k, v are then the expanded ones of all visible tokens, [K, H, D]. A decoding step does
    not need those: it attends to latents, with `expand` (the weights that expand them) folded into queries and results.
    """
    frame = current()
    layer = frame.memory.attention(frame.attention_layer)
    table, options = frame.tokens(layer), {"scale": scale, "sinks": sinks, "softcap": softcap}
    if not isinstance(layer.spec, LatentAttention):
        _write(layer, table, k, v)
        return attend_written(frame.attention_layer, q, sinks, scale, softcap)
    if isinstance(table, DecodeTokens):
        if expand is None:
            raise ConfigError(f"layer {frame.attention_layer} does not say how it expands latents")
        out: Tensor = kernel("attend_latents", table)(q, *layer.parts.values(), table, expand, **options)
    else:
        out = kernel("attend_visible", table)(q, k, v, table, **options)
    return out


def attend_written(source: int, q: Tensor, sinks: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """source: the layer whose pages are read. Not an operation, because graphs contain no layer numbers."""
    frame = current()
    layer = frame.memory.attention(source)
    keys, values = layer.parts.values()
    table = frame.tokens(layer)
    out: Tensor = kernel("attend", table)(q, keys, values, table, scale=scale, sinks=sinks, softcap=softcap)
    return out


def _latents_like(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return key.new_empty(count, *key.shape[1:]), value.new_empty(count, *value.shape[1:])


@operation("keep_latents(Tensor key, Tensor value) -> (Tensor, Tensor)", _latents_like)
def keep_latents(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """This step's latents [N, 1, D] -> the latents of all visible tokens [K, 1, D], request after request.

    In a decoding step attention reads the latents itself: this step's are returned.
    """
    frame = current()
    layer = frame.memory.attention(frame.attention_layer)
    table = frame.tokens(layer)
    _write(layer, table, key, value)
    if isinstance(table, DecodeTokens):
        return key, value
    first, second = layer.parts.values()
    return gather_tokens(first, table).to(key.dtype), gather_tokens(second, table).to(value.dtype)


def _write(layer: LayerMemory, table: TokenTable | DecodeTokens, key: Tensor, value: Tensor) -> None:
    kernel("write_tokens", table)(*layer.parts.values(), table, key, value)


# --- convolutions and scans: shapes are those of the kernels ----------------------------------------------------------


def _scan(kind: str, part: str, *inputs: Any, **options: Any) -> Any:
    """Run a kernel on a part of the layer's states."""
    frame = current()
    layer = frame.memory.state(frame.state_layer)
    table: SegmentTable | DecodeStates = frame.segments(layer)
    return kernel(kind, table)(*inputs, layer.parts[part], table, **options)


@operation("conv(Tensor x, Tensor weight, Tensor? bias, str? activation) -> Tensor", lambda x, *_: x.new_empty(x.shape))
def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Any:
    return _scan("conv", "conv", x, weight, bias, activation)


@operation(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool l2norm) -> Tensor",
    lambda q, k, v, *_: q.new_empty(v.shape),
)
def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool) -> Any:
    return _scan("gated_delta", "recurrent", q, k, v, g, beta, l2norm=l2norm)


@operation(
    "kimi_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool l2norm) -> Tensor",
    lambda q, k, v, *_: q.new_empty(v.shape),
)
def kimi_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool) -> Any:
    return _scan("kimi_delta", "recurrent", q, k, v, g, beta, l2norm=l2norm)


@operation(
    "mamba2(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, bool softplus, float low,"
    " float high) -> Tensor",
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
)
def mamba2(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> Any:
    options = {"d": d, "dt_bias": dt_bias, "dt_softplus": softplus, "dt_limit": (low, high)}
    return _scan("mamba2", "recurrent", x, dt, a, b, c, **options)


@operation(
    "mamba1(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? dt_bias, bool softplus)"
    " -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
)
def mamba1(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
) -> Any:
    return _scan("mamba1", "recurrent", x, dt, a, b, c, d=d, z=z, dt_bias=dt_bias, dt_softplus=softplus)


@operation("lightning(Tensor q, Tensor k, Tensor v, Tensor slope) -> Tensor", lambda q, *_: q.new_empty(q.shape))
def lightning(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Any:
    return _scan("lightning", "recurrent", q, k, v, slope)
