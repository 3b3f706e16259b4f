"""The demo model's shape, and a form of it that trains fast.

The checkpoint is a stock Qwen3-Next: `make_config` says which. `forward` computes what transformers' model computes,
from the same weights by the same names, in a form that a GPU can train: chunks of the gated delta rule in parallel, and
one short scan over their states. `tests/examples/test_train_demo.py` compares the two.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

HIDDEN, MLP, LAYERS = 256, 768, 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
KEY_HEADS, VALUE_HEADS, STATE_DIM, KERNEL = 2, 4, 128, 4
ROTARY_DIM, ROPE_THETA = HEAD_DIM // 4, 10_000.0
MAX_TOKENS = 8192
CHUNK = 64
EXPERTS, EXPERT_MLP, SHARED_MLP = 2, 512, 256
EXPERT_LAYER = 5
"""vLLM loads this architecture only if a layer has experts. One layer has two, and every token goes to both: nothing is
chosen, so nothing can be chosen differently by rounding."""
FULL_LAYERS = (1, 5)
"""Attention comes early: a convolution tells each token its predecessors, and attention right behind it can then look
for the place where the same tokens stood before. That is how the model copies."""

Weights = dict[str, Tensor]


def make_config(vocab_size: int, eos_token_id: int, pad_token_id: int) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        mlp_only_layers=[i for i in range(LAYERS) if i != EXPERT_LAYER],
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS,
        moe_intermediate_size=EXPERT_MLP,
        shared_expert_intermediate_size=SHARED_MLP,
        layer_types=["full_attention" if i in FULL_LAYERS else "linear_attention" for i in range(LAYERS)],
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=STATE_DIM,
        linear_value_head_dim=STATE_DIM,
        linear_conv_kernel_dim=KERNEL,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA, "partial_rotary_factor": 0.25},
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        dtype="bfloat16",
    )


def initial_weights(vocab_size: int, seed: int) -> Weights:
    """Random weights by the names of the stock checkpoint. What writes to the residual stream starts at zero."""
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * columns**-0.5

    weights: Weights = {"model.embed_tokens.weight": torch.randn(vocab_size, HIDDEN, generator=draw)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        weights[f"{at}input_layernorm.weight"] = torch.zeros(HIDDEN)
        weights[f"{at}post_attention_layernorm.weight"] = torch.zeros(HIDDEN)
        mlps = {"mlp.": MLP}
        if i == EXPERT_LAYER:
            mlps = {f"mlp.experts.{e}.": EXPERT_MLP for e in range(EXPERTS)} | {"mlp.shared_expert.": SHARED_MLP}
            weights[f"{at}mlp.gate.weight"] = torch.zeros(EXPERTS, HIDDEN)
            weights[f"{at}mlp.shared_expert_gate.weight"] = torch.zeros(1, HIDDEN)
        for inner, size in mlps.items():
            weights[f"{at}{inner}gate_proj.weight"] = matrix(size, HIDDEN)
            weights[f"{at}{inner}up_proj.weight"] = matrix(size, HIDDEN)
            weights[f"{at}{inner}down_proj.weight"] = torch.zeros(HIDDEN, size)
        if i in FULL_LAYERS:
            at += "self_attn."
            weights[f"{at}q_proj.weight"] = matrix(2 * HEADS * HEAD_DIM, HIDDEN)
            weights[f"{at}k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
            weights[f"{at}v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
            weights[f"{at}o_proj.weight"] = torch.zeros(HIDDEN, HEADS * HEAD_DIM)
            weights[f"{at}q_norm.weight"] = torch.zeros(HEAD_DIM)
            weights[f"{at}k_norm.weight"] = torch.zeros(HEAD_DIM)
        else:
            at += "linear_attn."
            key_dim, value_dim = KEY_HEADS * STATE_DIM, VALUE_HEADS * STATE_DIM
            weights[f"{at}in_proj_qkvz.weight"] = matrix(2 * key_dim + 2 * value_dim, HIDDEN)
            weights[f"{at}in_proj_ba.weight"] = matrix(2 * VALUE_HEADS, HIDDEN)
            weights[f"{at}conv1d.weight"] = (
                torch.rand(2 * key_dim + value_dim, 1, KERNEL, generator=draw) * 2 - 1
            ) * KERNEL**-0.5
            # Decays of a token: from 0.999 (a memory of a thousand tokens) down to 0.2.
            step = torch.exp(torch.rand(VALUE_HEADS, generator=draw) * math.log(100) + math.log(0.001))
            weights[f"{at}dt_bias"] = step + torch.log(-torch.expm1(-step))
            weights[f"{at}A_log"] = torch.log(torch.rand(VALUE_HEADS, generator=draw) * 15 + 1)
            weights[f"{at}norm.weight"] = torch.ones(STATE_DIM)
            weights[f"{at}out_proj.weight"] = torch.zeros(HIDDEN, value_dim)
    weights["model.norm.weight"] = torch.zeros(HIDDEN)
    weights["lm_head.weight"] = torch.zeros(vocab_size, HIDDEN)
    return weights


# Shapes: B rows, T tokens, H heads, N chunks of C tokens, D = STATE_DIM.


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def mlp(x: Tensor, layer: Weights) -> Tensor:
    x_norm = rms_norm(x, layer["post_attention_layernorm.weight"])
    if "mlp.gate.weight" not in layer:
        return x + gated(x_norm, layer, "mlp")
    shares = linear(x_norm, layer["mlp.gate.weight"]).float().softmax(-1).to(x.dtype)
    for e in range(EXPERTS):
        x = x + gated(x_norm, layer, f"mlp.experts.{e}") * shares[..., e : e + 1]
    shared = torch.sigmoid(linear(x_norm, layer["mlp.shared_expert_gate.weight"]))
    return x + gated(x_norm, layer, "mlp.shared_expert") * shared


def gated(x: Tensor, layer: Weights, at: str) -> Tensor:
    gate, up = linear(x, layer[f"{at}.gate_proj.weight"]), linear(x, layer[f"{at}.up_proj.weight"])
    return linear(F.silu(gate) * up, layer[f"{at}.down_proj.weight"])


def attention_layer(x: Tensor, layer: Weights) -> Tensor:
    rows, tokens, _ = x.shape
    x_norm = rms_norm(x, layer["input_layernorm.weight"])
    query, gate = linear(x_norm, layer["self_attn.q_proj.weight"]).view(rows, tokens, HEADS, -1).chunk(2, dim=-1)
    key = linear(x_norm, layer["self_attn.k_proj.weight"]).view(rows, tokens, KV_HEADS, -1)
    value = linear(x_norm, layer["self_attn.v_proj.weight"]).view(rows, tokens, KV_HEADS, -1)
    query = rotate(rms_norm(query, layer["self_attn.q_norm.weight"]).transpose(1, 2))
    key = rotate(rms_norm(key, layer["self_attn.k_norm.weight"]).transpose(1, 2))
    out = F.scaled_dot_product_attention(query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True)
    out = out.transpose(1, 2).reshape(rows, tokens, -1) * torch.sigmoid(gate.reshape(rows, tokens, -1))
    return mlp(x + linear(out, layer["self_attn.o_proj.weight"]), layer)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions on the first quarter of each head. x: [B, H, T, HEAD_DIM]"""
    half = torch.arange(0, ROTARY_DIM, 2, device=x.device, dtype=torch.float32)
    angles = torch.arange(x.shape[2], device=x.device).float()[:, None] * ROPE_THETA ** (-half / ROTARY_DIM)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right, rest = x.split((ROTARY_DIM // 2, ROTARY_DIM // 2, HEAD_DIM - ROTARY_DIM), dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)


def delta_layer(x: Tensor, layer: Weights) -> Tensor:
    rows, tokens, _ = x.shape
    x_norm = rms_norm(x, layer["input_layernorm.weight"])
    share = VALUE_HEADS // KEY_HEADS
    sizes = (STATE_DIM, STATE_DIM, share * STATE_DIM, share * STATE_DIM)
    qkvz = linear(x_norm, layer["linear_attn.in_proj_qkvz.weight"]).view(rows, tokens, KEY_HEADS, -1)
    query, key, value, z = qkvz.split(sizes, dim=-1)
    ba = linear(x_norm, layer["linear_attn.in_proj_ba.weight"]).view(rows, tokens, KEY_HEADS, -1).float()
    beta, a = (part.reshape(rows, tokens, VALUE_HEADS) for part in ba.split((share, share), dim=-1))
    mixed = torch.cat([part.reshape(rows, tokens, -1) for part in (query, key, value)], dim=-1)
    mixed = F.silu(convolve(mixed, layer["linear_attn.conv1d.weight"]))
    parts = mixed.split((KEY_HEADS * STATE_DIM, KEY_HEADS * STATE_DIM, VALUE_HEADS * STATE_DIM), dim=-1)
    query, key, value = (part.reshape(rows, tokens, -1, STATE_DIM) for part in parts)
    decay = -layer["linear_attn.A_log"].exp() * F.softplus(a + layer["linear_attn.dt_bias"])
    out = gated_delta_rule(
        unit(query).repeat_interleave(share, dim=2),
        unit(key).repeat_interleave(share, dim=2),
        value.float(),
        decay,
        beta.sigmoid(),
    )
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6) * layer["linear_attn.norm.weight"]
    out = out * F.silu(z.reshape(out.shape).float())
    out = linear(out.to(x.dtype).reshape(rows, tokens, -1), layer["linear_attn.out_proj.weight"])
    return mlp(x + out, layer)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Each channel over its last KERNEL tokens. x: [B, T, channels], weight: [channels, 1, KERNEL]"""
    kernel = weight[:, 0].to(x.dtype).unbind(-1)
    padded = F.pad(x, (0, 0, KERNEL - 1, 0))
    shifted = [padded[:, i : i + x.shape[1]] * kernel[i] for i in range(KERNEL)]
    return torch.stack(shifted).sum(0)


def unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """query, key, value: [B, T, H, D] float32; decay (log), beta: [B, T, H]; returns [B, T, H, D]."""
    rows, tokens, heads, _ = query.shape

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [B * H, N, C, ...]
        return x.transpose(1, 2).reshape(rows * heads, tokens // CHUNK, CHUNK, *x.shape[3:])

    query, key, value, beta = chunks(query) * STATE_DIM**-0.5, chunks(key), chunks(value), chunks(beta)[..., None]
    total = chunks(decay).cumsum(-1)  # log decay since the start of the chunk
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    since_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    overlap = ((key * beta) @ key.mT * between).tril(-1)
    inverse = invert_unit_lower(overlap)
    new_value, old_key = inverse @ (value * beta), inverse @ (key * beta * since_start)
    late_key = (key * to_end).mT
    keep = since_start[:, :, -1:] * torch.eye(STATE_DIM, device=query.device) - late_key @ old_key
    states = scan_states(keep, late_key @ new_value)
    within = query @ key.mT * between
    out = (query * since_start) @ states + within @ (new_value - old_key @ states)
    return out.reshape(rows, heads, tokens, -1).transpose(1, 2)


@torch.library.custom_op("train_demo::scan_states", mutates_args=())  # type: ignore[untyped-decorator]
def scan_states(keep: Tensor, add: Tensor) -> Tensor:
    """The state before each chunk: states[n + 1] = keep[n] @ states[n] + add[n], from zero. All: [B * H, N, D, D]"""
    states = torch.empty_like(add)
    states[:, 0] = 0
    for n in range(add.shape[1] - 1):
        torch.baddbmm(add[:, n], keep[:, n], states[:, n], out=states[:, n + 1])
    return states


@scan_states.register_fake  # type: ignore[untyped-decorator]
def _(keep: Tensor, add: Tensor) -> Tensor:
    return torch.empty_like(add)


@torch.library.custom_op("train_demo::scan_states_backward", mutates_args=())  # type: ignore[untyped-decorator]
def scan_states_backward(grad: Tensor, keep: Tensor) -> Tensor:
    """The gradient of each chunk's `add`: what all later states make of it."""
    back = torch.zeros_like(grad)
    for n in range(grad.shape[1] - 1, 0, -1):
        torch.baddbmm(grad[:, n], keep[:, n].mT, back[:, n], out=back[:, n - 1])
    return back


@scan_states_backward.register_fake  # type: ignore[untyped-decorator]
def _(grad: Tensor, keep: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _save_scan(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    keep, states = ctx.saved_tensors
    back = scan_states_backward(grad.contiguous(), keep)
    return back @ states.mT, back


scan_states.register_autograd(_scan_gradients, setup_context=_save_scan)


@torch.library.custom_op("train_demo::invert_unit_lower", mutates_args=())  # type: ignore[untyped-decorator]
def invert_unit_lower(overlap: Tensor) -> Tensor:
    """(1 + overlap)^-1 for strictly lower triangular matrices [..., C, C], row by row: exact also where keys repeat."""
    if overlap.is_cuda:
        from triangular import invert_unit_lower_cuda

        return invert_unit_lower_cuda(overlap)
    one = torch.eye(CHUNK, dtype=overlap.dtype, device=overlap.device).expand_as(overlap)
    return torch.linalg.solve_triangular(overlap, one, upper=False, unitriangular=True).contiguous()


@invert_unit_lower.register_fake  # type: ignore[untyped-decorator]
def _(overlap: Tensor) -> Tensor:
    return torch.empty(overlap.shape, dtype=overlap.dtype, device=overlap.device)


def _save_inverse(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_gradient(ctx: Any, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    return -(inverse.mT @ grad @ inverse.mT)


invert_unit_lower.register_autograd(_inverse_gradient, setup_context=_save_inverse)


def layers_of(weights: Weights) -> list[Weights]:
    """The weights of each layer, by their names within it."""
    found: list[Weights] = [{} for _ in range(LAYERS)]
    for name, weight in weights.items():
        if name.startswith("model.layers."):
            index, inner = name.removeprefix("model.layers.").split(".", 1)
            found[int(index)][inner] = weight
    return found


def head_loss(
    x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, importance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of cross entropies, each of them, and which tokens would have been chosen."""
    logits = linear(rms_norm(x, norm), head).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(importance)
    return (losses * importance).sum(), losses.detach(), logits.argmax(-1)


def dtype_for(device: torch.device) -> torch.dtype:
    """What to compute in: many CPUs have no instructions for bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Trainer:
    """Forward passes for training, with the layers compiled where that is asked for."""

    def __init__(self, compiled: bool, dtype: torch.dtype) -> None:
        def made(function: Any) -> Any:
            return torch.compile(function, dynamic=False) if compiled else function

        self._delta, self._attention, self._loss = made(delta_layer), made(attention_layer), made(head_loss)
        self._dtype = dtype

    def hidden(self, weights: Weights, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, weights["model.embed_tokens.weight"]).to(self._dtype)
        for i, layer in enumerate(layers_of(weights)):
            x = self._attention(x, layer) if i in FULL_LAYERS else self._delta(x, layer)
        return x

    def loss(
        self, weights: Weights, tokens: Tensor, targets: Tensor, importance: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = self.hidden(weights, tokens)
        return self._loss(x, weights["model.norm.weight"], weights["lm_head.weight"], targets, importance)  # type: ignore[no-any-return]
