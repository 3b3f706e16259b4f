"""Model types whose past is of a kind that hybridkv does not know yet: refused by name, in a plan and in the engine.

A plan that left a part of the past out would promise requests that do not fit, and the engine would compute nonsense.
A type that gets a record in `FAMILIES` loses its line here.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridkv.errors import ConfigError

REFUSED: Mapping[str, str] = {
    "axk2": "keeps index keys beside its latents",
    "deepseek_v32": "keeps index keys beside its latents",
    "deepseek_v4": "keeps compressed tokens and index keys beside its windows",
    "dots3_note": "keeps index keys beside its latents, and windows of latents",
    "glm5_next": "keeps index keys, pooled over tokens, beside its latents",
    "glm_moe_dsa": "keeps index keys beside its latents",
    "hrm_text": "runs its layers several times for a token and keeps keys and values of each run",
    "hy_v4": "keeps index keys beside its latents",
    "inkling": "keeps convolution inputs of attention and MLP beside its keys and values",
    "inkling2": "keeps convolution inputs of attention and MLP beside its keys and values",
    "minimax_m3": "keeps index keys beside its keys and values",
    "minimax_m3_vl": "keeps index keys beside its keys and values",
    "mistral_large4": "keeps index keys, and shares latents between layers",
    "qwen4_exp": "keeps index keys and the last token ids beside its states",
    "recurrent_gemma": "keeps the states of RG-LRU layers",
    "xlstm": "keeps the states of xLSTM layers",
    "zamba": "keeps the states of Mamba-1 heads beside shared attention",
    "zaya": "keeps convolution inputs and a delayed value beside its keys and values",
}
"""By type: the end of a sentence about its past."""


def check_known_past(model_type: str, name: str) -> None:
    """Raise ConfigError if `model_type`, a language model or what it is nested in, keeps a past of an unknown kind."""
    past = REFUSED.get(model_type) or REFUSED.get(model_type.removesuffix("_text"))
    if past is not None:
        raise ConfigError(
            f"{name} is of type {model_type!r}: {model_type} {past}, which hybridkv does not know yet; "
            "'hybridkv models' lists models that it knows"
        )
