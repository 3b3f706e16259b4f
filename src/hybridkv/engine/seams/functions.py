"""Our attention, conv and scan functions in the shape in which transformers' models call theirs.

Models see one packed row: batch 1, all requests' tokens one after another. Each function drops the batch axis, puts
tokens first, finds its layer in the active frame, and calls the kernel that fits the device. States are written to
pages by the kernels; the final state that models expect back is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from hybridkv.engine.seams.frame import Frame, current
from hybridkv.kernels.registry import kernel
from hybridkv.kernels.tokens import TokenTable, write_tokens
from hybridkv.memory import LayerMemory
from hybridkv.spec import LatentAttention


def attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,  # [1, H, N or K, D]
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered with transformers' AttentionInterface. What a query sees comes from the plan, not from arguments."""
    frame = current()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(frame, _kv_layer(module, frame), query, key, value, scale, softcap, s_aux), None


def attend(
    frame: Frame,
    source: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """source: the layer whose keys and values are read -> [1, N, Hq, Dv]"""
    layer = frame.memory.attention(source)
    table = frame.tokens(layer)
    rows = query[0].transpose(0, 1)
    if isinstance(layer.spec, LatentAttention):
        attend_visible = kernel("attend_visible", query.device)
        out: Tensor = attend_visible(
            rows, key[0].transpose(0, 1), value[0].transpose(0, 1), table, scale=scale, sinks=sinks, softcap=softcap
        )
    else:
        keys, values = layer.parts.values()
        out = kernel("attend", query.device)(rows, keys, values, table, scale=scale, sinks=sinks, softcap=softcap)
    return out[None]


def write(frame: Frame, key: Tensor, value: Tensor) -> tuple[LayerMemory, TokenTable]:
    """Put this step's tokens (`[1, heads, N, dim]`) in their pages."""
    layer = frame.memory.attention(frame.attention_layer)
    table = frame.tokens(layer)
    first, second = layer.parts.values()
    write_tokens(first, table, key[0].transpose(0, 1))
    write_tokens(second, table, value[0].transpose(0, 1))
    return layer, table


def keeps_latents(frame: Frame) -> bool:
    """Whether the layer's attention keeps what keys and values are made of, and not themselves."""
    return isinstance(frame.memory.attention(frame.attention_layer).spec, LatentAttention)


def _kv_layer(module: nn.Module, frame: Frame) -> int:
    """The layer whose keys and values this attention reads: in some models later layers share those of earlier ones."""
    shared = module.kv_shared_layer_index if getattr(module, "is_kv_shared_layer", False) else None
    return frame.attention_layer if shared is None else int(shared)


def conv(
    frame: Frame, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """x: [1, C, N]"""
    layer = frame.memory.state(frame.state_layer)
    run = kernel("conv", x.device)
    out: Tensor = run(x[0].t(), weight, bias, activation, layer.parts["conv"], frame.segments(layer))
    return out.t()[None]


def gated_delta(
    frame: Frame, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return _delta("gated_delta", frame, query, key, value, g, beta, **kwargs)


def kimi_delta(
    frame: Frame, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return _delta("kimi_delta", frame, query, key, value, g, beta, **kwargs)


def _delta(
    kind: str,
    frame: Frame,
    query: Tensor,  # [1, N, H, Dk]
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    layer = frame.memory.state(frame.state_layer)
    states, table = layer.parts["recurrent"], frame.segments(layer)
    run = kernel(kind, query.device)
    out = run(query[0], key[0], value[0], g[0], beta[0], states, table, l2norm=use_qk_l2norm_in_kernel)
    return out[None], _nothing(out)


def mamba2(
    frame: Frame,
    x: Tensor,  # [1, N, H, P]
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
    layer = frame.memory.state(frame.state_layer)
    states, table = layer.parts["recurrent"], frame.segments(layer)
    out = kernel("mamba2", x.device)(
        x[0], dt[0], a, b[0], c[0], states, table, d=D, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit
    )
    return out[None], _nothing(out)


def mamba1(
    frame: Frame,
    x: Tensor,  # [1, C, N]
    dt: Tensor,
    a: Tensor,
    b: Tensor,  # [1, S, N]
    c: Tensor,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    layer = frame.memory.state(frame.state_layer)
    states, table = layer.parts["recurrent"], frame.segments(layer)
    gate = None if z is None else z[0].t()
    out = kernel("mamba1", x.device)(
        x[0].t(), dt[0].t(), a, b[0].t(), c[0].t(), states, table,
        d=D, z=gate, dt_bias=delta_bias, dt_softplus=delta_softplus,
    )  # fmt: skip
    return out.t()[None], _nothing(out)


def lightning(frame: Frame, mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Lightning attention has no function of its own to stand in for: this is its whole mixer around our scan."""
    frame.state_layer = mixer.layer_idx
    return around_lightning(mixer, hidden_states, partial(lightning_scan, frame)), None


def around_lightning(mixer: Any, hidden_states: Tensor, scan: Callable[..., Tensor]) -> Tensor:
    heads, dim = mixer.num_attention_heads, mixer.head_dim
    q, k, v = mixer.act_fn(mixer.qkv_proj(hidden_states[0])).view(-1, heads, 3 * dim).split(dim, dim=-1)
    out = mixer.norm(scan(q, k, v, mixer.slope_rate.flatten()).reshape(1, -1, heads * dim))
    gated: Tensor = mixer.out_proj(mixer.output_gate(hidden_states).sigmoid() * out)
    return gated


def lightning_scan(frame: Frame, q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    """q, k, v: [N, H, D], slope: [H] -> [N, H, D]"""
    layer = frame.memory.state(frame.state_layer)
    out: Tensor = kernel("lightning", q.device)(q, k, v, slope, layer.parts["recurrent"], frame.segments(layer))
    return out


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)
