"""Tiny models with a vision (or audio) tower around the text model: how many checkpoints are published.

Only text goes through them. Nothing here knows the engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.engine.reference import by_torch
from tests.engine.weights import fill_weights
from tests.engine.zoo import ALL, NOT_INSTALLED, build, family_config
from tests.tiny import QWEN_VISION

_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_LLAMA4_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vision_output_dim": 64,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}
_KIMI_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 16,
}
_AUDIO: dict[str, Any] = {
    "hidden_size": 32,
    "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1,
    "sscp_conv_channel_size": [8, 4],
    "vocab_size": 4,
    "vocab_offset": 319,
}
_VISION_TOKENS: dict[str, Any] = {"vocab_size": 4, "vocab_offset": 315, "hidden_size": 2048}

# Placeholders of images and sounds lie above the text vocabulary of the tests' prompts, or are never drawn.
_MISTRAL3: dict[str, Any] = {
    "wrapper": "mistral3",
    "vision_config": _PIXTRAL,
    "image_token_index": 319,
    "tie_word_embeddings": False,
}
_AROUND: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": _SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 319},
    "qwen3_5": {"vision_config": QWEN_VISION, "image_token_id": 319, "video_token_id": 318},
    "llama4": {"vision_config": _LLAMA4_VISION, "image_token_index": 319},
    "gemma3n": {"audio_config": _AUDIO, "vision_config": _VISION_TOKENS},
    "gemma4": {
        "vision_config": _GEMMA4_VISION,
        "audio_config": None,
        **{f"{name}_token_id": 319 - n for n, name in enumerate(("image", "video", "audio", "boi", "eoi"))},
    },
    "deepseek_v3": {
        "wrapper": "kimi_k25",
        "vision_config": _KIMI_VISION,
        "projection_hidden_size": 32,
        "image_token_id": 319,
        "video_token_id": 318,
        "tie_word_embeddings": False,
    },
    "mistral": _MISTRAL3,
    "ministral3": _MISTRAL3,
    "mistral4": {"wrapper": "mistral3", "vision_config": _PIXTRAL, "image_token_index": 319},
}
"""Composites by the family in them. `wrapper`: their model type where it is another."""
COMPOSITES = {
    name: parts
    for name, parts in _AROUND.items()
    if name not in NOT_INSTALLED and parts.get("wrapper", name) in CONFIG_MAPPING_NAMES
}
COMPOSITE_ONLY = ["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "muse_glimmer", "muse_spark", "step3p5"]
"""Families of the zoo that are composites there."""


def composite_config(name: str) -> Any:
    """The config of a tiny composite model: the family's text config inside it."""
    from transformers import CONFIG_MAPPING

    if name in COMPOSITE_ONLY:
        return family_config(name)
    fields = {"wrapper": name, **COMPOSITES[name]}
    return CONFIG_MAPPING[fields.pop("wrapper")](text_config=family_config(name).to_dict(), **fields)


@contextlib.contextmanager
def no_timm() -> Iterator[None]:
    """Gemma 3n's vision tower comes from timm, which text does not need: leave it empty."""
    from transformers import AutoModel
    from transformers.models.gemma3n import modeling_gemma3n

    def tower(config: Any) -> Any:
        return torch.nn.Identity() if config.model_type == "gemma3n_vision" else AutoModel.from_config(config)

    with mock.patch.object(modeling_gemma3n, "AutoModel", mock.Mock(from_config=tower)):
        yield


@functools.cache
def build_composite(name: str, seed: int = 0) -> Any:
    """A tiny `...ForConditionalGeneration`: float32, eval, one a process."""
    from transformers import AutoModelForImageTextToText

    if name in COMPOSITE_ONLY:
        return build(name, seed)
    with no_timm():
        model = AutoModelForImageTextToText.from_config(composite_config(name), dtype=torch.float32).eval()
    fill_weights(model, seed, ALL[name].branch_scale)
    return by_torch(model)
