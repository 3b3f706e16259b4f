"""Model types that the engine runs. Unknown ones are refused: wrong output would not be noticed."""

from __future__ import annotations

from hybridkv.errors import ConfigError

SUPPORTED = frozenset({
    "bamba",
    "deepseek_v3",
    "falcon_h1",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama",
    "llama4_text",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
})  # fmt: skip
"""Model types of language models, each compared with the stock model by the tests."""


def check_supported(model_type: str, name: str) -> None:
    if model_type not in SUPPORTED:
        raise ConfigError(
            f"{name} is of type {model_type!r}, which the engine does not run: it runs {', '.join(sorted(SUPPORTED))}"
        )
