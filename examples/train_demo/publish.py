"""Writes a checkpoint that transformers, vLLM and hybridkv load, and a picture of the losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from model import Weights, make_config
from safetensors.torch import save_file
from tokens import END_OF_TEXT, MESSAGE_END

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def publish(weights: Weights, bpe: Any, run: Path) -> None:
    """RUN/model: config, weights in bfloat16, tokenizer."""
    from transformers import GenerationConfig

    directory = run / "model"
    directory.mkdir(exist_ok=True)
    end, pad = bpe.token_to_id(MESSAGE_END), bpe.token_to_id(END_OF_TEXT)
    make_config(bpe.get_vocab_size(), end, pad).save_pretrained(directory)
    GenerationConfig(eos_token_id=end, pad_token_id=pad).save_pretrained(directory)
    small = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(small, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes files for their owner alone
    for name in TOKENIZER_FILES:
        (directory / name).write_bytes((run / name).read_bytes())


def draw_losses(log: Path, picture: Path) -> None:
    try:
        import matplotlib.pyplot as plot
    except ModuleNotFoundError:
        print(f"no matplotlib: {picture} is not drawn; {log} has the figures")
        return
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [line for line in lines if line["step"] >= 100]
    steps = [line["step"] for line in lines]
    figure, left = plot.subplots(figsize=(8, 4))
    left.plot(steps, [line["text_loss"] for line in lines], label="text")
    left.plot(steps, [line["chat_loss"] for line in lines], label="conversation")
    left.set(xlabel="step", ylabel="loss (nats a token)", ylim=(0, 6))
    right = left.twinx()
    right.plot(steps, [line["exact_accuracy"] for line in lines], "k--", label="right tokens of exact replies")
    right.set(ylim=(0, 1.02))
    figure.legend(loc="upper center", ncol=3)
    figure.savefig(picture, dpi=100)
