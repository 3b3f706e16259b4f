"""Every family's reader against the cache that the real transformers model builds, and against its config class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from hybridkv.models import catalogue, load_model, read_compute, read_config
from hybridkv.models.family import FAMILIES, OLDEST_TRANSFORMERS
from hybridkv.spec import ChunkedLocal, FullAttention, LatentAttention, LayerSpec, LinearState, SlidingWindow
from tests.tiny import TINY, auto_class, is_installed, tiny_config

NUM_TOKENS = 40
Shapes = dict[str, tuple[int, ...]]


def test_every_family_has_a_tiny_model() -> None:
    assert set(TINY) == {model_type for model_type in FAMILIES if is_installed(model_type)}


def test_every_record_names_a_release_that_has_its_model() -> None:
    missing = sorted(set(TINY) - set(CONFIG_MAPPING))
    assert not missing, f"transformers {transformers.__version__} has no {missing}: correct `since` in their records"


def test_the_oldest_release_is_allowed_and_tested() -> None:
    root = Path(__file__).resolve().parents[2]
    assert f'"transformers>={OLDEST_TRANSFORMERS},<' in (root / "pyproject.toml").read_text(encoding="utf-8")
    assert f"transformers=={OLDEST_TRANSFORMERS}.0 " in (root / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(("release", "expected"), [("5.9.3", 0), ("5.20.0.dev0", 1), ("5.20.2", 1), ("6.0", 1)])
def test_a_record_knows_whether_a_release_has_its_model(release: str, expected: bool) -> None:
    assert replace(FAMILIES["llama"], since="5.20").is_in(release) == expected


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_specs_describe_the_cache_of_the_real_model(model_type: str) -> None:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    text = config.get_text_config(decoder=True)
    model = auto_class(config).from_config(config).eval().float()
    with torch.no_grad():
        output = model(torch.arange(NUM_TOKENS)[None] % text.vocab_size, use_cache=True)
    cache = output.get("past_key_values")
    cache = output.get("cache_params") if cache is None else cache

    spec = read_config(config.to_dict(), name=model_type)

    assert spec.model_type == model_type
    assert spec.num_layers == text.num_hidden_layers
    assert {layer: shapes for layer in range(spec.num_layers) if (shapes := real_shapes(cache, layer))} == {
        layer: shapes for layer in range(spec.num_layers) if (shapes := spec_shapes(spec.layers, layer))
    }


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_saved_and_minimal_configs_read_alike(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type)
    config.save_pretrained(tmp_path)
    whole = read_config(config.to_dict(), name="m")
    minimal = {**config.to_diff_dict(), "model_type": config.model_type}

    assert load_model(tmp_path).layers == whole.layers
    assert load_model(tmp_path / "config.json").layers == whole.layers
    assert read_config(json.loads(json.dumps(minimal)), name="m").layers == whole.layers


# What a config must give, because its class has no default that makes a model.
NEEDED: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2},
    "nemotron_h": {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
    "glm4_moe": {"head_dim": 128},
    "qwen3_omni_moe_text": {"head_dim": 128},
}


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    given = NEEDED.get(model_type, {})
    silent = read_config({"model_type": model_type, **given}, name="m")
    assert silent.layers == read_config(CONFIG_MAPPING[model_type](**given).to_dict(), name="m").layers


@pytest.mark.parametrize(
    "wrapper", ["gemma3", "gemma3n", "llama4", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "muse_glimmer"]
)
def test_multimodal_configs_are_read_by_their_text_config(wrapper: str) -> None:
    config = CONFIG_MAPPING[wrapper]()
    text = read_config(config.text_config.to_dict(), name="m")
    assert read_config(config.to_dict(), name="m").layers == text.layers
    assert read_config({"model_type": wrapper}, name="m").layers == text.layers


def test_the_text_of_kimi_k25_is_deepseek_s_under_its_published_name() -> None:
    text = tiny_config("deepseek_v3").to_dict()
    whole = {"model_type": "kimi_k25", "text_config": {**text, "model_type": "kimi_k2"}}
    assert read_config(whole, name="m") == read_config(CONFIG_MAPPING["kimi_k25"](**whole).to_dict(), name="m")
    assert read_config(whole, name="m").layers == read_config(text, name="m").layers


@pytest.mark.parametrize("model_type", sorted(TINY))
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_together_keep_the_whole(model_type: str, tp: int) -> None:
    config = tiny_config(model_type).to_dict()
    whole = read_config(config, name="m")
    ranks = [read_config(config, name="m", tp=tp, rank=rank) for rank in range(tp)]
    for index, spec in enumerate(whole.layers):
        for number, part in enumerate(spec.parts):
            pieces = [rank.layers[index].parts[number] for rank in ranks]
            assert len({piece.shape for piece in pieces}) == 1
            for run, local in zip(part.runs, zip(*(piece.runs for piece in pieces), strict=True), strict=True):
                kept = {unit for split in local for unit in range(split.start, split.start + split.count)}
                assert kept == set(range(run.total))


@pytest.mark.skipif("gemma4_text" not in TINY, reason="transformers has no Gemma 4 yet")
def test_gemma4_as_published_reads_like_gemma4_as_saved() -> None:
    """Published configs name the sizes of full attention apart; transformers writes them layer by layer."""
    names = {"global_head_dim": 40, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 24}
    published = {"model_type": "gemma4_text", "num_hidden_layers": 12, **names}
    saved = CONFIG_MAPPING["gemma4_text"](**published).to_dict()
    assert "per_layer_config" in saved
    assert read_config(published, name="m").layers == read_config(saved, name="m").layers
    shapes = {spec.kind: {part.shape for part in spec.parts} for spec in read_config(published, name="m").layers}
    assert shapes == {"full_attention": {(1, 40)}, "sliding_window": {(4, 24)}}


def test_step_as_published_reads_like_step_as_saved() -> None:
    """Published configs have other names for some sizes, and list MTP layers, which transformers writes apart."""
    entry = catalogue()["step-3.5-flash"].config
    small = {"num_attention_groups": 4, "moe_num_experts": 16, "moe_top_k": 3, "moe_layers_enum": "2, 4,5"}
    for published in ({**entry}, {**entry, **small}):
        saved = CONFIG_MAPPING["step3p5"](**published).to_dict()
        assert len(saved["layer_types"]) < len(published["layer_types"])
        assert {"per_layer_config", "mlp_layer_types", "num_key_value_heads"} <= set(saved)
        ours = read_config(published, name="m", mtp=True)
        assert ours == read_config(saved, name="m", mtp=True)
        assert read_compute(published, name="m", use_defaults=False) == read_compute(saved, name="m")
        assert read_config({"model_type": "step3p7", "text_config": published}, name="m", mtp=True) == ours
        kinds = [spec.kind for spec in ours.layers]
        assert (len(kinds), kinds.count("full_attention"), kinds[45:]) == (48, 12, ["sliding_window"] * 3)


def real_shapes(cache: Any, layer: int) -> Shapes:
    """What a transformers cache holds for one layer and one sequence."""
    shapes: Shapes = {}
    lightning = getattr(cache, "linear_cache", [])  # MiniMax keeps its states apart
    if layer < len(lightning) and torch.is_tensor(lightning[layer]):
        shapes["recurrent"] = tuple(lightning[layer].shape[1:])
    if layer >= len(cache.layers):
        return shapes
    kept = cache.layers[layer]
    if torch.is_tensor(getattr(kept, "keys", None)):
        for name, tensor in (("k", kept.keys), ("v", kept.values)):
            _, heads, tokens, dim = tensor.shape
            shapes[name] = (tokens, heads, dim)
    for tensor in getattr(kept, "conv_states", {}).values():
        if torch.is_tensor(tensor):
            shapes["conv"] = (tensor.shape[1], tensor.shape[2] - 1)  # transformers keeps one column more than needed
    for tensor in getattr(kept, "recurrent_states", {}).values():
        if torch.is_tensor(tensor):
            shapes["recurrent"] = tuple(tensor.shape[1:])
    return shapes


def spec_shapes(layers: tuple[LayerSpec, ...], layer: int) -> Shapes:
    """The same, as our specs say it. transformers calls latents keys and their rotary part values."""
    shapes: Shapes = {}
    for spec in (spec for spec in layers if spec.layer == layer):
        for part in spec.parts:
            if isinstance(spec, LinearState):
                shapes[part.name] = part.shape
            else:
                name = {"latent": "k", "rope": "v"}.get(part.name, part.name)
                shapes[name] = (visible_tokens(spec), *part.shape)
    return shapes


def visible_tokens(spec: LayerSpec) -> int:
    """Tokens transformers keeps after NUM_TOKENS: of a window or chunk, those the next token can see at most."""
    if isinstance(spec, (FullAttention, LatentAttention)):
        return NUM_TOKENS
    assert isinstance(spec, (SlidingWindow, ChunkedLocal))
    return min(NUM_TOKENS, (spec.window if isinstance(spec, SlidingWindow) else spec.chunk) - 1)
