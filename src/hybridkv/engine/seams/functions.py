"""Our attention, conv and scan functions, with the signatures of those in transformers' models.

Models see one packed row: batch 1, the tokens of all requests one after another. Each function drops the batch axis,
moves tokens to the first axis, and calls an operation of `ops`, which runs at once or becomes part of a compiled graph.
The kernels write states to pages; the final state that models expect back is empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hybridkv.engine.seams import ops
from hybridkv.engine.seams.frame import current, sees_layers


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
    """Registered with transformers' AttentionInterface. The plan decides which keys a query sees, not the arguments."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = query[0].transpose(0, 1)
    source = kv_source(module)
    if source is None:
        own = key[0].transpose(0, 1), value[0].transpose(0, 1)
        out = ops.attend(rows, *own, s_aux, scale, softcap, _expansion(module))
    else:
        out = ops.attend_written(source, rows, s_aux, scale, softcap)
    return out.contiguous()[None], None  # some models view it in another shape


def kv_source(module: nn.Module) -> int | None:
    """The layer whose keys and values a layer uses: the last one of its type that computes any. None: its own.

    Worked out from the config, because attributes that say it come and go with releases of transformers.
    """
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    config, types = module.config, module.config.layer_types
    own = config.num_hidden_layers - config.num_kv_shared_layers
    return max(layer for layer in range(own) if types[layer] == types[module.layer_idx])


def _expansion(module: nn.Module) -> Tensor | None:
    """The weights that expand a layer's latents to keys and values, if it has any."""
    expand = getattr(module, "kv_b_proj", None)
    return None if expand is None else expand.weight


def keep(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A cache's `update`: this step's keys and values, [1, heads, N, dim] -> the keys and values that the model uses.

    Plain keys and values are passed through: attention writes and reads their pages itself. Latents are expanded by the
    model before attention, so the latents of all visible tokens are returned, request after request. In a decoding step
    attention reads latents as they are, and only this step's are returned.
    """
    if not ops.keeps_latents():
        return key, value
    first, second = ops.keep_latents(key[0].transpose(0, 1), value[0].transpose(0, 1))
    return first.transpose(0, 1)[None], second.transpose(0, 1)[None]


def conv(
    x: Tensor,  # [1, C, N]
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    out: Tensor = ops.conv(x[0].t(), weight, bias, activation)
    return out.t()[None]


def _delta_rule(scan: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def delta_rule(
        query: Tensor,  # [1, N, H, Dk]
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        shared = value.shape[2] // key.shape[2]
        if shared > 1:  # transformers 5.23 leaves it to this function that value heads share queries and keys
            query, key = query.repeat_interleave(shared, dim=2), key.repeat_interleave(shared, dim=2)
        out = scan(query[0], key[0], value[0], g[0], beta[0], use_qk_l2norm_in_kernel)
        return out[None], _nothing(out)

    return delta_rule


gated_delta = _delta_rule(ops.gated_delta)
kimi_delta = _delta_rule(ops.kimi_delta)


def mamba2(
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
    out = ops.mamba2(x[0], dt[0], a, b[0], c[0], D, dt_bias, dt_softplus, *dt_limit)
    return out[None], _nothing(out)


def mamba1(
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
    gate = None if z is None else z[0].t()
    out = ops.mamba1(x[0].t(), dt[0].t(), a, b[0].t(), c[0].t(), D, gate, delta_bias, delta_softplus)
    return out.t()[None], _nothing(out)


def lightning(mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The whole mixer of Lightning attention with our scan: it calls no function that could be replaced."""
    if sees_layers():
        current().state_layer = mixer.layer_idx
    heads, dim = mixer.num_attention_heads, mixer.head_dim
    q, k, v = mixer.act_fn(mixer.qkv_proj(hidden_states[0])).view(-1, heads, 3 * dim).split(dim, dim=-1)
    out = mixer.norm(ops.lightning(q, k, v, mixer.slope_rate.flatten()).reshape(1, -1, heads * dim))
    return mixer.out_proj(mixer.output_gate(hidden_states).sigmoid() * out), None


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)
