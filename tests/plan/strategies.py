"""Random layer mixes for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from hybridkv.spec import (
    ChunkedLocal,
    DType,
    FullAttention,
    HiddenTap,
    LatentAttention,
    LayerSpec,
    LinearState,
    ModelSpec,
    Part,
    SlidingWindow,
    Split,
)

dtypes = st.sampled_from(list(DType))


def _key_value(heads: int, key_dim: int, value_dim: int, dtype: DType) -> tuple[Part, ...]:
    run = (Split.whole(heads),)
    return (Part("k", run, (key_dim,), dtype), Part("v", run, (value_dim,), dtype))


key_values = st.builds(_key_value, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), dtypes)


@st.composite
def latents(draw: st.DrawFn) -> tuple[Part, ...]:
    one, dtype = (Split.whole(1),), draw(dtypes)
    return (
        Part("latent", one, (draw(st.integers(1, 32)),), dtype),
        Part("rope", one, (draw(st.integers(1, 8)),), dtype),
    )


@st.composite
def states(draw: st.DrawFn) -> tuple[Part, ...]:
    run = (Split.whole(draw(st.integers(1, 7))),)
    conv = Part("conv", (*run, *run), (draw(st.integers(1, 3)),), draw(dtypes))
    recurrent = Part("recurrent", run, (draw(st.integers(1, 9)), draw(st.integers(1, 9))), draw(dtypes))
    return (conv, recurrent) if draw(st.booleans()) else (recurrent,)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Up to nine layers of any kinds; a layer may keep attention and a state; taps on some."""
    num_layers = draw(st.integers(1, 9))
    attention, latent, state = draw(st.lists(key_values, min_size=1, max_size=2)), draw(latents()), draw(states())
    hidden = (Part("hidden", (Split.whole(1),), (draw(st.integers(1, 16)),), DType.BFLOAT16),)
    layers: list[LayerSpec] = []
    for layer in range(num_layers):
        match draw(st.sampled_from(["full", "latent", "window", "chunk", "state", "both"])):
            case "full":
                layers.append(FullAttention(layer, draw(st.sampled_from(attention))))
            case "latent":
                layers.append(LatentAttention(layer, latent))
            case "window":
                layers.append(SlidingWindow(layer, attention[0], draw(st.sampled_from([5, 24]))))
            case "chunk":
                layers.append(ChunkedLocal(layer, attention[0], 32))
            case "state":
                layers.append(LinearState(layer, state))
            case "both":
                layers += [FullAttention(layer, attention[0]), LinearState(layer, state)]
        if draw(st.booleans()):
            layers.append(HiddenTap(layer, hidden))
    return ModelSpec("random", "random", num_layers, 16, DType.BFLOAT16, 1, 0, tuple(layers), "random")
