"""How many weights the feed-forward part of each layer has, and how many of them a token meets. Matrices only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.models.config import Config


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of parameters."""

    active: int
    """Those a token passes through; a matrix it passes through twice counts twice."""
    total: int

    @classmethod
    def dense(cls, count: int) -> Weights:
        """Every token meets all of them."""
        return cls(count, count)

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.active + other.active, self.total + other.total)


NONE = Weights(0, 0)
FeedForward = Callable[[Config, int, str], Weights]
"""From a config, a layer and its type to the weights of its feed-forward part."""


def _mlp(cfg: Config, inner: int, matrices: int = 3) -> Weights:
    return Weights.dense(matrices * cfg.integer("hidden_size") * inner)


def _experts(cfg: Config, experts: int, inner: int, *, width: int | None = None, matrices: int = 3) -> Weights:
    """Routed experts and their router; `width` is what an expert reads and writes, the hidden size by default."""
    hidden = cfg.integer("hidden_size")
    expert = matrices * (width or hidden) * inner
    chosen = min(experts, cfg.integer("num_experts_per_tok", "num_experts_per_token"))
    return Weights(chosen * expert, experts * expert) + Weights.dense(hidden * experts)


def _none(cfg: Config, layer: int, kind: str) -> Weights:
    return NONE


def _dense(cfg: Config, layer: int, kind: str) -> Weights:
    return _mlp(cfg, cfg.integer("intermediate_size"))


def _mixtral(cfg: Config, layer: int, kind: str) -> Weights:
    return _experts(cfg, cfg.integer("num_local_experts", "num_experts"), cfg.integer("intermediate_size"))


def _qwen(cfg: Config, layer: int, kind: str) -> Weights:
    step = cfg.optional_integer("decoder_sparse_step") or 1
    if layer in cfg.integers("mlp_only_layers") or (layer + 1) % step:
        return _dense(cfg, layer, kind)
    routed = _experts(cfg, cfg.integer("num_experts", "num_local_experts"), cfg.integer("moe_intermediate_size"))
    return routed + _mlp(cfg, cfg.optional_count("shared_expert_intermediate_size"))


def _llama4(cfg: Config, layer: int, kind: str) -> Weights:
    step = cfg.integer("interleave_moe_layer_step")
    chosen = cfg.integers("moe_layers")
    if layer in chosen or (not chosen and (layer + 1) % step == 0):
        return _mixtral(cfg, layer, kind) + _dense(cfg, layer, kind)  # one shared expert, as large as the routed
    return _mlp(cfg, cfg.integer("intermediate_size_mlp"))


def _deepseek(cfg: Config, layer: int, kind: str) -> Weights:
    if layer < cfg.optional_count("first_k_dense_replace"):
        return _dense(cfg, layer, kind)
    inner = cfg.integer("moe_intermediate_size")
    experts = cfg.integer("n_routed_experts", "num_experts", "num_local_experts")
    return _experts(cfg, experts, inner) + _mlp(cfg, inner * cfg.optional_count("n_shared_experts"))


def _kimi(cfg: Config, layer: int, kind: str) -> Weights:
    kinds = cfg.strings("mlp_layer_types")
    is_dense = kinds[layer] == "dense" if kinds else layer < cfg.optional_count("first_k_dense_replace")
    if is_dense:
        return _dense(cfg, layer, kind)
    inner = cfg.integer("moe_intermediate_size")
    routed = _experts(cfg, cfg.integer("num_experts", "num_local_experts"), inner)
    return routed + _mlp(cfg, inner * cfg.optional_count("num_shared_experts", "n_shared_experts"))


def _gemma3n(cfg: Config, layer: int, kind: str) -> Weights:
    """Beside the MLP: a low-rank residual, the inputs each layer gets of its own, and the router of the streams."""
    hidden = cfg.integer("hidden_size")
    inner = cfg.get("intermediate_size")
    mlp = _mlp(cfg, cfg.integers("intermediate_size")[layer]) if isinstance(inner, list) else _dense(cfg, layer, kind)
    beside = 2 * cfg.integer("laurel_rank") + 2 * cfg.integer("hidden_size_per_layer_input")
    return mlp + Weights.dense(hidden * (beside + cfg.integer("altup_num_inputs")))


def _lfm2(cfg: Config, layer: int, kind: str) -> Weights:
    """The config names the size of an MLP without gate; one with a gate gets two thirds of it, rounded up."""
    inner = cfg.integer("block_ff_dim", "intermediate_size")
    if cfg.get("block_auto_adjust_ff_dim"):
        scale, unit = cfg.get("block_ffn_dim_multiplier"), cfg.integer("block_multiple_of")
        inner = int((1.0 if scale is None else scale) * (2 * inner // 3))
        inner = -(-inner // unit) * unit
    return _mlp(cfg, inner)


def _lfm2_moe(cfg: Config, layer: int, kind: str) -> Weights:
    if layer < cfg.optional_count("num_dense_layers"):
        return _dense(cfg, layer, kind)
    return _experts(cfg, cfg.integer("num_experts"), cfg.integer("moe_intermediate_size"))


def _granite(cfg: Config, layer: int, kind: str) -> Weights:
    routed = _mixtral(cfg, layer, kind) if cfg.optional_count("num_local_experts") else NONE
    return routed + _mlp(cfg, cfg.integer("shared_intermediate_size"))


def _nemotron(cfg: Config, layer: int, kind: str) -> Weights:
    """MLPs without a gate, in layers of their own; experts may work in a latent space."""
    if kind == "mlp":
        return _mlp(cfg, cfg.integer("intermediate_size"), matrices=2)
    if kind != "moe":
        return NONE
    latent = cfg.optional_integer("moe_latent_size")
    inner = cfg.integer("moe_intermediate_size")
    routed = _experts(cfg, cfg.integer("n_routed_experts"), inner, width=latent, matrices=2)
    shared = cfg.optional_count("n_shared_experts") and cfg.integer("moe_shared_expert_intermediate_size")
    return routed + _mlp(cfg, shared + (latent or 0), matrices=2)


def _jamba(cfg: Config, layer: int, kind: str) -> Weights:
    if layer % cfg.integer("expert_layer_period") == cfg.optional_count("expert_layer_offset"):
        return _experts(cfg, cfg.integer("num_experts"), cfg.integer("intermediate_size"))
    return _dense(cfg, layer, kind)


FEED_FORWARD: dict[str, FeedForward] = {
    "llama": _dense,
    "mistral": _dense,
    "mixtral": _mixtral,
    "qwen2": _dense,
    "qwen3": _dense,
    "qwen3_moe": _qwen,
    "gemma2": _dense,
    "gemma3_text": _dense,
    "gemma3n_text": _gemma3n,
    "gpt_oss": _mixtral,
    "olmo3": _dense,
    "llama4_text": _llama4,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "qwen3_next": _qwen,
    "qwen3_5_text": _dense,
    "qwen3_5_moe_text": _qwen,
    "olmo_hybrid": _dense,
    "kimi_linear": _kimi,
    "minimax": _mixtral,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "falcon_h1": _dense,
    "bamba": _dense,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron,
    "zamba2": _none,  # part of the shared block: see weights.py
    "jamba": _jamba,
    "mamba2": _none,
}
