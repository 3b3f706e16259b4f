"""How many weights a model has, and how many a token passes through: from its config, and from what its layers keep.

Matrices, convolutions and embeddings are counted; norms and biases are not, they are under a percent of any published
model. The specs must be those of the whole model: of one tensor-parallel rank of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hybridkv.errors import ConfigError
from hybridkv.models.config import Config
from hybridkv.models.feed_forward import FEED_FORWARD, NONE, Weights
from hybridkv.spec import LatentAttention, LayerSpec, LinearState, Part

_DELTA_RULE = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"}
_OUTPUT_GATE = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}


def layer_weights(cfg: Config, kinds: Sequence[str], specs: Sequence[LayerSpec]) -> Weights:
    """All layers, and what stands around them but the embeddings and the LM head. `kinds`: the type of each layer."""
    feed_forward = FEED_FORWARD[cfg.model_type]
    weights = sum((feed_forward(cfg, layer, kind) for layer, kind in enumerate(kinds)), NONE)
    weights = sum((_mixer(cfg, spec) for spec in specs), weights)
    if cfg.model_type == "zamba2":
        weights += _shared_blocks(cfg, sum(not isinstance(spec, LinearState) for spec in specs))
    if cfg.model_type == "gemma3n_text":
        weights += _around_gemma3n(cfg, len(kinds), sum(kind == "shared_kv" for kind in kinds))
    return weights


def head_parameters(cfg: Config) -> int:
    """Of the LM head; the embeddings have as many."""
    return cfg.integer("vocab_size") * cfg.integer("hidden_size")


def embedding_parameters(cfg: Config, num_layers: int) -> int:
    """Of tables a token looks itself up in; without the LM head's, if that is the same table."""
    tied = cfg.get("tie_word_embeddings", "tie_embedding", default=False)
    parameters = 0 if tied else head_parameters(cfg)
    if cfg.model_type == "gemma3n_text":
        per_layer = cfg.integer("hidden_size_per_layer_input") * cfg.integer("vocab_size_per_layer_input")
        parameters += num_layers * per_layer
    return parameters


def latent_head_dims(cfg: Config) -> tuple[int, int]:
    """Of MLA: what a query head and a value head of one token have when they are written out."""
    return cfg.integer("qk_nope_head_dim") + cfg.integer("qk_rope_head_dim"), cfg.integer("v_head_dim")


def _mixer(cfg: Config, spec: LayerSpec) -> Weights:
    if isinstance(spec, LinearState):
        return Weights.dense(_state_mixer(cfg, {part.name: part for part in spec.parts}))
    if isinstance(spec, LatentAttention):
        return Weights.dense(_latent(cfg))
    if cfg.model_type == "zamba2":
        return NONE  # shared by several layers: counted apart
    return Weights.dense(_attention(cfg, spec.parts[0]))


def _attention(cfg: Config, keys: Part) -> int:
    """Q, K, V and output; some gate their output with a second Q."""
    kv_heads, dim = keys.shape
    gated = cfg.model_type in _OUTPUT_GATE and cfg.get("attn_output_gate", default=True)
    return cfg.integer("hidden_size") * dim * (cfg.integer("num_attention_heads") * (3 if gated else 2) + 2 * kv_heads)


def _latent(cfg: Config) -> int:
    hidden, heads, rank = cfg.integer("hidden_size"), cfg.integer("num_attention_heads"), cfg.integer("kv_lora_rank")
    query_dim, value_dim = latent_head_dims(cfg)
    query_rank = cfg.optional_integer("q_lora_rank")
    query = query_rank * (hidden + heads * query_dim) if query_rank else hidden * heads * query_dim
    down = hidden * (rank + cfg.integer("qk_rope_head_dim"))
    up = rank * heads * (cfg.integer("qk_nope_head_dim") + value_dim)
    return query + down + up + heads * value_dim * hidden


def _state_mixer(cfg: Config, parts: dict[str, Part]) -> int:
    hidden = cfg.integer("hidden_size")
    conv, state = parts.get("conv"), parts.get("recurrent")
    if conv is None:
        if state is None:
            raise ConfigError(f"config of {cfg.name}: a state layer that keeps nothing has no known weights")
        heads, dim, _ = state.shape
        return 5 * hidden * heads * dim  # lightning: Q, K, V, gate, output
    channels, kernel = conv.shape[0], conv.shape[1] + 1
    convolution = channels * kernel
    if state is None:
        return convolution + 4 * hidden * channels  # short convolution: three inputs, one output
    if len(state.shape) == 2:
        return convolution + _mamba1(cfg, *state.shape)
    heads, rows, columns = state.shape
    if cfg.model_type == "kimi_linear":
        inner = heads * columns  # two gates through a bottleneck as wide as a head
        return convolution + hidden * (4 * inner + heads) + 2 * columns * (hidden + inner)
    is_delta = cfg.model_type in _DELTA_RULE
    inner = heads * (columns if is_delta else rows)
    scalars = heads * (2 if is_delta else 1)  # decay and, of the delta rule, write strength
    return convolution + hidden * (channels + inner + scalars) + inner * hidden


def _mamba1(cfg: Config, channels: int, state: int) -> int:
    hidden = cfg.integer("hidden_size")
    given = cfg.get("mamba_dt_rank", default="auto")
    rank = -(-hidden // 16) if given in ("auto", None) else cfg.integer("mamba_dt_rank")
    return channels * (3 * hidden + (rank + 2 * state) + rank + state)


def _shared_blocks(cfg: Config, uses: int) -> Weights:
    """Zamba's attention blocks: a few, met again and again, each time with an adapter and a projection of its own."""
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


def _around_gemma3n(cfg: Config, num_layers: int, num_shared: int) -> Weights:
    """Query and output of the layers that read another layer's KV, and what makes and merges the parallel streams."""
    hidden, heads = cfg.integer("hidden_size"), cfg.integer("num_attention_heads")
    shared = num_shared * 2 * hidden * heads * cfg.integer("head_dim")
    inputs = hidden * num_layers * cfg.integer("hidden_size_per_layer_input")
    streams = 2 * (cfg.integer("altup_num_inputs") - 1) * hidden * hidden
    return Weights.dense(shared + inputs + streams)


def state_elements(spec: LayerSpec) -> int:
    """Numbers in the recurrent state of a layer."""
    return sum(prod(part.shape) for part in spec.parts if part.name == "recurrent")
