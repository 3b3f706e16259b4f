"""vLLM's KV cache groups, beside the layers that hybridkv expects. What is not known here is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from hybridkv.errors import InputError
from hybridkv.sight import EVERYTHING, Sight
from hybridkv.spec import (
    AttentionLayer,
    ChunkedLocal,
    LatentAttention,
    LayerSpec,
    LinearState,
    ModelSpec,
    Part,
    SlidingWindow,
)


class LayerKey(NamedTuple):
    """A layer of the model. One decoder layer may have attention and a state."""

    layer: int
    is_state: bool


class Table(NamedTuple):
    """The block table of one of vLLM's groups."""

    number: int
    """Index among the block ids that vLLM passes around."""
    block_tokens: int
    is_state: bool
    sight: Sight = EVERYTHING
    """What its layers see."""

    @property
    def name(self) -> str:
        return f"group{self.number}"


class KnownLayer(NamedTuple):
    """A layer as both describe it."""

    name: str
    """vLLM's."""
    number: int
    """The number in this name, which vLLM's hooks are called with. It may differ from that of the decoder layer."""
    table: Table
    theirs: KVCacheSpec
    ours: LayerSpec


def layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """vLLM's spec of each layer, by its name."""
    return {name: spec for group in config.kv_cache_groups for name, spec in _members(group).items()}


def known_layers(config: KVCacheConfig, model: ModelSpec, block_tokens: int) -> dict[LayerKey, KnownLayer]:
    """Every layer that keeps something. Raises InputError where the two descriptions differ."""
    expected = {LayerKey(spec.layer, isinstance(spec, LinearState)): spec for spec in model.layers}
    keys = _keys_by_name(expected)
    found: dict[LayerKey, KnownLayer] = {}
    for number, group in enumerate(config.kv_cache_groups):
        for name, spec in _members(group).items():
            named = _named(name, spec)
            key = keys.get(named)
            if key is None or key in found:
                raise InputError(f"vLLM keeps a cache for {name} of {model.name}, which hybridkv does not know")
            ours = expected[key]
            sight = ours.sight if isinstance(ours, AttentionLayer) else EVERYTHING
            table = Table(number, group.kv_cache_spec.block_size, key.is_state, sight)
            if not key.is_state and table.block_tokens % block_tokens:
                raise InputError(
                    f"vLLM's blocks of {table.block_tokens} tokens ({name}) cannot be cut into blocks of "
                    f"{block_tokens}: set --block-size to a multiple of {block_tokens}"
                )
            _check(name, spec, ours)
            found[key] = KnownLayer(name, named.layer, table, spec, ours)
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise InputError(f"vLLM keeps no cache for layer {missing[0].layer} of {model.name}, which needs one")
    return found


def _keys_by_name(layers: Collection[LayerKey]) -> dict[LayerKey, LayerKey]:
    """Return the layer of each name of vLLM's, by the number and the kind that the name stands for.

    A name has the number of its decoder layer. No two names may have the same: where decoder layers have attention and
    a state (Falcon-H1, Zamba2), vLLM counts the layers with attention from 0, and adds their count to the numbers of
    states. Zamba2's attention is counted along one shared block, then along the next. That order is kept, so what is
    stored for one of these layers may be another's of the same shapes: for all vLLM engines alike, and nothing else
    reads it (`shared_identity`).
    """
    attention = sorted(key for key in layers if not key.is_state)
    if not any(LayerKey(key.layer, True) in layers for key in attention):
        return {key: key for key in layers}
    counted = {LayerKey(count, False): key for count, key in enumerate(attention)}
    return counted | {LayerKey(len(attention) + key.layer, True): key for key in layers if key.is_state}


def state_axes(part: Part, theirs: MambaSpec) -> tuple[int, ...]:
    """The axes of a state's part, in the order that vLLM has them, outermost first."""
    if part.name == "conv":
        return (0, 1) if is_conv_state_dim_first() else (1, 0)
    if theirs.mamba_type is MambaAttentionBackendEnum.GDN_ATTN:
        return (0, 2, 1)  # heads, values, keys
    return tuple(range(len(part.shape)))


def _named(name: str, spec: KVCacheSpec) -> LayerKey:
    """Return the number in a name of vLLM's, and the kind of its layer."""
    try:
        return LayerKey(int(extract_layer_index(name)), isinstance(spec, MambaSpec))
    except (AssertionError, IndexError):
        raise InputError(
            f"vLLM keeps a cache for {name}, and the name does not say for which layer; this model is not supported"
        ) from None


def _members(group: KVCacheGroupSpec) -> Mapping[str, KVCacheSpec]:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)


def _check(name: str, theirs: KVCacheSpec, ours: LayerSpec) -> None:
    """Kind, sight and sizes of one layer must agree."""
    if isinstance(ours, LinearState):
        _check_state(name, theirs, ours)
    elif isinstance(ours, LatentAttention):
        elements = sum(part.inner[0] for part in ours.parts)
        _expect(name, "kind", type(theirs), (MLAAttentionSpec,))
        _expect(name, "elements of a latent", theirs.head_size, (elements,))
        _expect(name, "tokens of an element", theirs.tokens_per_state, (1,))
        _expect(name, "dtype", _dtype(theirs.dtype), (ours.parts[0].dtype.value,))
    else:
        assert isinstance(ours, AttentionLayer)
        _check_sight(name, theirs, ours)
        _expect(name, "tokens of an element", theirs.tokens_per_state, (1,))
        _expect(name, "KV heads", theirs.num_kv_heads, (ours.parts[0].shape[0],))
        _expect(name, "head size", (theirs.head_size, theirs.head_size_v), (tuple(p.inner[0] for p in ours.parts),))
        _expect(name, "dtype", _dtype(theirs.dtype), (ours.parts[0].dtype.value,))


def _check_sight(name: str, theirs: KVCacheSpec, ours: AttentionLayer) -> None:
    """A window that vLLM keeps like full attention is refused: a load fills what is seen, and vLLM would share all."""
    kinds = {SlidingWindow: SlidingWindowSpec, ChunkedLocal: ChunkedLocalAttentionSpec}
    _expect(name, "kind", type(theirs), (kinds.get(type(ours), FullAttentionSpec),))
    _expect(name, "window", getattr(theirs, "sliding_window", None), (ours.sight.window,))
    _expect(name, "chunk", getattr(theirs, "attention_chunk_size", None), (ours.sight.chunk,))


def _check_state(name: str, theirs: KVCacheSpec, ours: LinearState) -> None:
    _expect(name, "kind", type(theirs), (MambaSpec,))
    _expect(name, "tensors of a state", len(theirs.shapes), (len(ours.parts),))
    for shape, dtype, part in zip(theirs.shapes, theirs.dtypes, ours.parts, strict=True):
        expected = tuple(part.shape[axis] for axis in state_axes(part, theirs))
        _expect(name, f"shape of {part.name}", tuple(shape), (expected,))
        _expect(name, f"dtype of {part.name}", _dtype(dtype), (part.dtype.value,))
    _expect(name, "speculative blocks", theirs.num_speculative_blocks, (0,))


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _expect(name: str, what: str, found: object, expected: tuple[object, ...]) -> None:
    if found not in expected:
        wanted = " or ".join(str(getattr(one, "__name__", one)) for one in expected)
        raise InputError(
            f"{name}: vLLM has {what} {getattr(found, '__name__', found)}, and hybridkv expects {wanted}; "
            f"this combination is not supported"
        )
