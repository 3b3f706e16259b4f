"""A checkpoint that speculators' EAGLE-3 computes the right targets from.

The EAGLE-3 draft of speculators 0.9 normalises the verifier's last hidden state with `model.norm.weight` as the factor.
In Qwen3-Next the factor is one plus that weight. So the copy has one added to the weight. Besides it, speculators reads
the config, the tokenizer, `embed_tokens` and `lm_head`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from hybridkv.demo import demo_model

NORM = "model.norm.weight"


def with_plain_norm(directory: Path) -> Path:
    copy = Path(shutil.copytree(demo_model(), directory / demo_model().name))
    weights = load_file(copy / "model.safetensors")
    save_file({**weights, NORM: weights[NORM].float() + 1}, copy / "model.safetensors", metadata={"format": "pt"})
    return copy
