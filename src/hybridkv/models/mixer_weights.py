"""How many weights attention and state layers have. Matrices and convolutions only.

A family's record names the function for its layers; those here that no record names are chosen by what a layer keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hybridkv.errors import ConfigError
from hybridkv.models.config import Config
from hybridkv.models.feed_forward import NONE, Weights
from hybridkv.spec import FullAttention, LatentAttention, LayerSpec, LinearState, Part

# --- attention --------------------------------------------------------------------------------------------------------


def attention(cfg: Config, spec: LayerSpec) -> int:
    """Attention to keys and values, or to latents."""
    return latent_attention(cfg) if isinstance(spec, LatentAttention) else plain_attention(cfg, spec)


def plain_attention(cfg: Config, spec: LayerSpec) -> int:
    """Q, K, V and output."""
    return query_and_output(cfg, spec) + cfg.integer("hidden_size") * sum(prod(part.shape) for part in spec.parts)


def query_and_output(cfg: Config, spec: LayerSpec) -> int:
    """Weights of a layer that attends as `spec` says: a query has the size of a key, and a result that of a value."""
    return cfg.integer("hidden_size") * cfg.integer("num_attention_heads") * sum(part.shape[1] for part in spec.parts)


def gated_attention(cfg: Config, spec: LayerSpec) -> int:
    """The output is gated with a second Q, unless the config says no."""
    gate = cfg.integer("hidden_size") * spec.parts[0].shape[1] * cfg.integer("num_attention_heads")
    return plain_attention(cfg, spec) + (gate if cfg.get("attn_output_gate", default=True) else 0)


def gated_heads(cfg: Config, spec: LayerSpec) -> int:
    """One gate for the output of each head, unless the config says no."""
    gate = cfg.integer("hidden_size") * cfg.integer("num_attention_heads")
    return attention(cfg, spec) + (gate if cfg.get("use_attention_gate", default=True) else 0)


def gemma4_attention(cfg: Config, spec: LayerSpec) -> int:
    """With `attention_k_eq_v`, layers of full attention make keys and values of one product."""
    has_one = isinstance(spec, FullAttention) and cfg.get("attention_k_eq_v", default=False)
    one = cfg.integer("hidden_size") * prod(spec.parts[1].shape)
    return plain_attention(cfg, spec) - (one if has_one else 0)


def head_gated_attention(cfg: Config, spec: LayerSpec) -> int:
    """The output is gated: with one number a head, or with one an element."""
    heads = cfg.integer("num_attention_heads")
    by_head = cfg.get("gating", default=True) in (True, "per-head")
    gates = heads if by_head else heads * spec.parts[0].shape[1]
    return plain_attention(cfg, spec) + cfg.integer("hidden_size") * gates


def counted_apart(cfg: Config, spec: LayerSpec) -> int:
    """Attention that several layers share: `Family.around` counts it."""
    return 0


def latent_head_dims(cfg: Config) -> tuple[int, int]:
    """Return the sizes of a query head and of a value head of MLA when they are written out."""
    if cfg.get("v_head_dim") is None:
        value_dim = cfg.quotient(cfg.integer("hidden_size"), "num_attention_heads", "hidden_size")
    else:
        value_dim = cfg.integer("v_head_dim")
    return cfg.integer("qk_nope_head_dim") + cfg.integer("qk_rope_head_dim"), value_dim


def latent_attention(cfg: Config) -> int:
    hidden, heads, rank = cfg.integer("hidden_size"), cfg.integer("num_attention_heads"), cfg.integer("kv_lora_rank")
    query_dim, value_dim = latent_head_dims(cfg)
    query_rank = cfg.optional_integer("q_lora_rank")
    query = query_rank * (hidden + heads * query_dim) if query_rank else hidden * heads * query_dim
    down = hidden * (rank + cfg.integer("qk_rope_head_dim"))
    up = rank * heads * (cfg.integer("qk_nope_head_dim") + value_dim)
    return query + down + up + heads * value_dim * hidden


# --- states -----------------------------------------------------------------------------------------------------------


def by_kept_parts(cfg: Config, spec: LinearState) -> int:
    """The layer whose past has these shapes: lightning attention, a short convolution, Mamba-1 or Mamba-2."""
    parts = {part.name: part for part in spec.parts}
    conv, state = parts.get("conv"), parts.get("recurrent")
    if conv is None:
        if state is None:
            raise ConfigError(f"config of {cfg.name}: a state layer that keeps nothing has no known weights")
        return _lightning(cfg, state)
    if state is None:
        return _convolution(conv) + 4 * cfg.integer("hidden_size") * conv.shape[0]  # three inputs, one output
    if len(state.shape) == 2:
        return _convolution(conv) + _mamba1(cfg, *state.shape)
    heads, head_dim, _ = state.shape
    return _gated_scan(cfg, conv, inner=heads * head_dim, scalars=heads)


def delta_rule(cfg: Config, spec: LinearState) -> int:
    """Each head has a decay and a write strength."""
    conv, state = spec.parts
    heads, _, columns = state.shape
    return _gated_scan(cfg, conv, inner=heads * columns, scalars=2 * heads)


def kimi_delta_rule(cfg: Config, spec: LinearState) -> int:
    """Two gates, through a bottleneck as wide as a head."""
    conv, state = spec.parts
    hidden, (heads, _, columns) = cfg.integer("hidden_size"), state.shape
    inner = heads * columns
    return _convolution(conv) + hidden * (4 * inner + heads) + 2 * columns * (hidden + inner)


def full_kimi_delta_rule(cfg: Config, spec: LinearState) -> int:
    """Two gates, without a bottleneck."""
    conv, state = spec.parts
    heads, _, columns = state.shape
    return _convolution(conv) + cfg.integer("hidden_size") * heads * (6 * columns + 1)


def _gated_scan(cfg: Config, conv: Part, inner: int, scalars: int) -> int:
    hidden = cfg.integer("hidden_size")
    return _convolution(conv) + hidden * (conv.shape[0] + inner + scalars) + inner * hidden


def _convolution(conv: Part) -> int:
    channels, reach = conv.shape
    return channels * (reach + 1)


def _lightning(cfg: Config, state: Part) -> int:
    heads, dim, _ = state.shape
    return 5 * cfg.integer("hidden_size") * heads * dim  # Q, K, V, gate, output


def _mamba1(cfg: Config, channels: int, state: int) -> int:
    hidden = cfg.integer("hidden_size")
    given = cfg.get("mamba_dt_rank", "time_step_rank", default="auto")
    rank = -(-hidden // 16) if given in ("auto", None) else cfg.integer("mamba_dt_rank", "time_step_rank")
    return channels * (3 * hidden + (rank + 2 * state) + rank + state)


# --- around the layers ------------------------------------------------------------------------------------------------


def nothing_around(cfg: Config, kinds: Sequence[str], specs: Sequence[LayerSpec]) -> Weights:
    return NONE


def zamba_shared_blocks(cfg: Config, kinds: Sequence[str], specs: Sequence[LayerSpec]) -> Weights:
    """Zamba's attention blocks: a few, met again and again, each time with an adapter and a projection of its own."""
    uses = sum(not isinstance(spec, LinearState) for spec in specs)
    hidden, heads, rank = cfg.integer("hidden_size"), cfg.integer("num_attention_heads"), cfg.integer("adapter_rank")
    inner = cfg.optional_integer("intermediate_size") or 4 * hidden
    dim = 2 * hidden // heads  # the block reads the hidden state beside the embeddings
    kv_heads = cfg.optional_integer("num_key_value_heads") or heads
    attention = 2 * hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden
    block = attention + 3 * hidden * inner
    own = rank * (hidden + 2 * inner) + hidden * hidden
    if cfg.get("use_shared_attention_adapter", default=False):
        own += 3 * rank * 4 * hidden
    return Weights(uses * (block + own), min(uses, cfg.integer("num_mem_blocks")) * block + uses * own)


def gemma3n_streams(cfg: Config, kinds: Sequence[str], specs: Sequence[LayerSpec]) -> Weights:
    """Weights that make the inputs of each layer, and that make and merge the parallel streams."""
    hidden = cfg.integer("hidden_size")
    inputs = hidden * len(kinds) * cfg.integer("hidden_size_per_layer_input")
    streams = 2 * (cfg.integer("altup_num_inputs") - 1) * hidden * hidden
    return Weights.dense(inputs + streams)


def gemma4_inputs(cfg: Config, kinds: Sequence[str], specs: Sequence[LayerSpec]) -> Weights:
    """Weights that make the inputs of each layer, if layers have inputs of their own."""
    width = cfg.optional_count("hidden_size_per_layer_input")
    return Weights.dense(cfg.integer("hidden_size") * len(kinds) * width)


def no_tables(cfg: Config, num_layers: int) -> int:
    return 0


def tables_by_layer(cfg: Config, num_layers: int) -> int:
    """Embeddings that each layer has of its own, if there are any."""
    width = cfg.optional_count("hidden_size_per_layer_input")
    return num_layers * width * cfg.integer("vocab_size_per_layer_input") if width else 0
