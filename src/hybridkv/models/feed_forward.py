"""How many weights the feed-forward part of each layer has, and how many of them a token meets. Matrices only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridkv.errors import ConfigError
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


def _experts(
    cfg: Config, experts: int, inner: int, *, chosen: int | None = None, width: int | None = None, matrices: int = 3
) -> Weights:
    """Routed experts and their router.

    `chosen`: experts of a token, by default `num_experts_per_tok`. `width`: what an expert reads and writes, by default
    the hidden size. Where the config itself states another width, all experts share a projection to it, and one back.
    """
    hidden, own = cfg.integer("hidden_size"), cfg.optional_integer("routed_expert_hidden_size")
    expert = matrices * (width or own or hidden) * inner
    chosen = min(experts, chosen or cfg.integer("num_experts_per_tok", "num_experts_per_token", "top_k_experts"))
    return Weights(chosen * expert, experts * expert) + Weights.dense(hidden * (experts + 2 * (own or 0)))


def no_feed_forward(cfg: Config, layer: int, kind: str) -> Weights:
    return NONE


def dense(cfg: Config, layer: int, kind: str) -> Weights:
    return _mlp(cfg, cfg.integer("intermediate_size"))


def ungated(cfg: Config, layer: int, kind: str) -> Weights:
    return _mlp(cfg, cfg.integer("intermediate_size"), matrices=2)


def mixtral_experts(cfg: Config, layer: int, kind: str) -> Weights:
    return _experts(cfg, cfg.integer("num_local_experts", "num_experts"), cfg.integer("intermediate_size"))


def qwen_experts(cfg: Config, layer: int, kind: str) -> Weights:
    step = cfg.optional_integer("decoder_sparse_step") or 1
    if layer in cfg.integers("mlp_only_layers") or (layer + 1) % step:
        return dense(cfg, layer, kind)
    routed = _experts(cfg, cfg.integer("num_experts", "num_local_experts"), cfg.integer("moe_intermediate_size"))
    return routed + _mlp(cfg, cfg.optional_count("shared_expert_intermediate_size"))


def llama4_experts(cfg: Config, layer: int, kind: str) -> Weights:
    step = cfg.integer("interleave_moe_layer_step")
    chosen = cfg.integers("moe_layers")
    if layer in chosen or (not chosen and (layer + 1) % step == 0):
        return mixtral_experts(cfg, layer, kind) + dense(cfg, layer, kind)  # one shared expert, as large as the routed
    return _mlp(cfg, cfg.integer("intermediate_size_mlp"))


def deepseek_experts(cfg: Config, layer: int, kind: str) -> Weights:
    """A dense MLP, or routed experts beside experts that serve every token."""
    if _is_dense(cfg, layer):
        return dense(cfg, layer, kind)
    inner = cfg.integer("moe_intermediate_size")
    experts = cfg.integer("n_routed_experts", "num_experts", "num_local_experts")
    return _experts(cfg, experts, inner) + _mlp(
        cfg, inner * cfg.optional_count("n_shared_experts", "num_shared_experts")
    )


def _is_dense(cfg: Config, layer: int) -> bool:
    """A list by layer goes before the number of dense layers at the start."""
    kinds = cfg.strings("mlp_layer_types")
    if kinds is not None:
        return kinds[layer] == "dense"
    step = cfg.optional_integer("moe_layer_freq") or 1
    return layer < cfg.optional_count("first_k_dense_replace", "num_dense_layers") or layer % step > 0


def ernie_experts(cfg: Config, layer: int, kind: str) -> Weights:
    first, last = cfg.optional_count("moe_layer_start_index"), cfg.get("moe_layer_end_index")
    is_between = first <= layer and (last == -1 or layer <= last)
    if not is_between or (layer + 1) % cfg.integer("moe_layer_interval"):
        return dense(cfg, layer, kind)
    inner = cfg.integer("moe_intermediate_size")
    routed = _experts(cfg, cfg.integer("moe_num_experts"), inner, chosen=cfg.integer("moe_k"))
    return routed + _mlp(cfg, inner * cfg.optional_count("moe_num_shared_experts"))


def hunyuan_experts(cfg: Config, layer: int, kind: str) -> Weights:
    """The shared expert is as large as a routed one. Layers may choose different numbers of experts."""
    given = cfg.get("moe_topk")
    chosen = cfg.integers("moe_topk")[layer] if isinstance(given, list) else cfg.integer("moe_topk")
    routed = _experts(cfg, cfg.integer("num_experts"), cfg.integer("intermediate_size"), chosen=chosen)
    return routed + dense(cfg, layer, kind)


def longcat_experts(cfg: Config, layer: int, kind: str) -> Weights:
    """An MLP after each attention layer, and experts beside the first of two. Experts without weights are routed to,
    too: a token passes through this many weights at most."""
    mlp = _mlp(cfg, cfg.integer("ffn_hidden_size", "intermediate_size"))
    if layer % 2:
        return mlp
    inner = cfg.integer("expert_ffn_hidden_size", "moe_intermediate_size")
    chosen = cfg.integer("moe_topk", "num_experts_per_tok")
    routed = _experts(cfg, cfg.integer("n_routed_experts", "num_local_experts"), inner, chosen=chosen)
    return mlp + routed + Weights.dense(cfg.integer("hidden_size") * cfg.optional_count("zero_expert_num"))


def muse_experts(cfg: Config, layer: int, kind: str) -> Weights:
    """Experts work in a narrower space: one matrix leads there, one back."""
    if _is_dense(cfg, layer):
        return dense(cfg, layer, kind)
    width = cfg.integer("moe_hidden_size")
    routed = _experts(cfg, cfg.integer("num_local_experts"), cfg.integer("moe_intermediate_size"), width=width)
    return routed + _mlp(cfg, width, matrices=2)


def gemma3n_feed_forward(cfg: Config, layer: int, kind: str) -> Weights:
    """Beside the MLP: a low-rank residual, the inputs each layer gets of its own, and the router of the streams."""
    hidden = cfg.integer("hidden_size")
    inner = cfg.get("intermediate_size")
    mlp = _mlp(cfg, cfg.integers("intermediate_size")[layer]) if isinstance(inner, list) else dense(cfg, layer, kind)
    beside = 2 * cfg.integer("laurel_rank") + 2 * cfg.integer("hidden_size_per_layer_input")
    return mlp + Weights.dense(hidden * (beside + cfg.integer("altup_num_inputs")))


def gemma4_feed_forward(cfg: Config, layer: int, kind: str) -> Weights:
    """An MLP, wider in layers that read another's KV if the config says so, with experts beside it if there are any."""
    is_wide = kind.startswith("shared_") and cfg.get("use_double_wide_mlp", default=False)
    mlp = _mlp(cfg, (2 if is_wide else 1) * cfg.integer("intermediate_size"))
    if cfg.get("enable_moe_block", default=False):
        mlp += _experts(cfg, cfg.integer("num_experts"), cfg.integer("moe_intermediate_size"))
    own_input = cfg.optional_count("hidden_size_per_layer_input")
    return mlp + _mlp(cfg, own_input, matrices=2)


def experts_by_layer(cfg: Config, layer: int, kind: str) -> Weights:
    """`mlp_layer_types` says which layers have experts; by default all but the first. Some have a shared one."""
    kinds = cfg.strings("mlp_layer_types")
    if (kinds[layer] if kinds else "sparse" if layer else "dense") != "sparse":
        return dense(cfg, layer, kind)
    experts = cfg.integer("n_routed_experts", "num_experts", "num_local_experts")
    routed = _experts(cfg, experts, cfg.integer("moe_intermediate_size"))
    return routed + _mlp(cfg, cfg.optional_count("shared_expert_intermediate_size"))


def step_experts(cfg: Config, layer: int, kind: str) -> Weights:
    """Routed experts beside a shared one, in the layers that the config names; by default in all but the first three.
    Published configs have other names for some sizes."""
    kinds = cfg.strings("mlp_layer_types")
    if not (kinds[layer] == "sparse" if kinds else layer in _moe_layers_enum(cfg)):
        return dense(cfg, layer, kind)
    experts = cfg.integer("n_routed_experts", "moe_num_experts", "num_local_experts")
    chosen = cfg.integer("num_experts_per_tok", "moe_top_k")
    routed = _experts(cfg, experts, cfg.integer("moe_intermediate_size"), chosen=chosen)
    return routed + _mlp(cfg, cfg.integer("share_expert_dim", "share_expert_dims"))


def _moe_layers_enum(cfg: Config) -> Sequence[int]:
    """The layers with experts: a list, or their numbers in a string, with commas between."""
    given = cfg.get("moe_layers_enum", default=None)
    if given is None:
        return range(3, cfg.num_layers)
    if not isinstance(given, str):
        return cfg.integers("moe_layers_enum")
    try:
        return [int(number) for number in given.split(",") if number.strip()]
    except ValueError:
        raise ConfigError(
            f"config of {cfg.name}: moe_layers_enum is {given[:60]!r}, expected numbers of layers with commas between"
        ) from None


def lfm2_feed_forward(cfg: Config, layer: int, kind: str) -> Weights:
    """The config names the size of an MLP without gate; one with a gate gets two thirds of it, rounded up."""
    inner = cfg.integer("block_ff_dim", "intermediate_size")
    if cfg.get("block_auto_adjust_ff_dim"):
        scale, unit = cfg.get("block_ffn_dim_multiplier"), cfg.integer("block_multiple_of")
        inner = int((1.0 if scale is None else scale) * (2 * inner // 3))
        inner = -(-inner // unit) * unit
    return _mlp(cfg, inner)


def lfm2_experts(cfg: Config, layer: int, kind: str) -> Weights:
    if layer < cfg.optional_count("num_dense_layers"):
        return dense(cfg, layer, kind)
    return _experts(cfg, cfg.integer("num_experts"), cfg.integer("moe_intermediate_size"))


def granite_experts(cfg: Config, layer: int, kind: str) -> Weights:
    routed = mixtral_experts(cfg, layer, kind) if cfg.optional_count("num_local_experts") else NONE
    return routed + _mlp(cfg, cfg.integer("shared_intermediate_size"))


def nemotron_blocks(cfg: Config, layer: int, kind: str) -> Weights:
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


def jamba_experts(cfg: Config, layer: int, kind: str) -> Weights:
    if layer % cfg.integer("expert_layer_period") == cfg.optional_count("expert_layer_offset"):
        return _experts(cfg, cfg.integer("num_experts"), cfg.integer("intermediate_size"))
    return dense(cfg, layer, kind)
