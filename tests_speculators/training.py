"""`speculators train` in this process and on a CPU.

speculators 0.9 trains on an accelerator only: it moves everything to the device of its local rank, a number, and waits
for an accelerator before it reads its clock. `on_cpu` replaces these two. The options choose what speculators has for
other hardware: its losses without Triton, attention without FlexAttention (which has no backward pass on a CPU), and
float32, because the trainer's autocast is for CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig
from stock_model import DRAFT_LAYERS, SAMPLE_TOKENS

FOR_CPU = ["--loss-implementation=eager", "--draft-attn-impl=eager", "--hidden-states-dtype=float32", "--num-workers=0"]
SMALL = ["--speculator-type=eagle3", "--optimizer=adamw", f"--total-seq-len={2 * SAMPLE_TOKENS}", "--ttt-steps=2"]


def train(data: Path, verifier: Path, *options: str, epochs: int) -> list[dict[str, float]]:
    """Train an EAGLE-3 draft. Returns the metrics of each step."""
    places = [f"--data-path={data}", f"--verifier-name-or-path={verifier}", f"--save-path={data / 'checkpoints'}"]
    layers = ["--target-layer-ids", *map(str, DRAFT_LAYERS)]
    config = TrainConfig.resolve([*places, *FOR_CPU, *SMALL, f"--epochs={epochs}", *layers, *options])
    with on_cpu(), logged_steps() as steps:
        main(config)
    return steps


@contextmanager
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "get_local_rank", lambda: "cpu")
        patch.setattr(torch.accelerator, "synchronize", lambda: None)
        yield


@contextmanager
def logged_steps() -> Iterator[list[dict[str, float]]]:
    """What the trainer logs of each training step. It replaces the handlers of its own logger: listen to the root."""
    steps: list[dict[str, float]] = []

    class Steps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told: Any = record.msg
            if isinstance(told, dict) and "train" in told:
                steps.append({**told["train"], "epoch": told["epoch"]})

    handler = Steps()
    logging.getLogger().addHandler(handler)
    try:
        yield steps
    finally:
        logging.getLogger().removeHandler(handler)


def losses(steps: list[dict[str, float]]) -> list[float]:
    """The mean loss of each epoch."""
    by_epoch: dict[float, list[float]] = {}
    for step in steps:
        by_epoch.setdefault(step["epoch"], []).append(step["loss"])
    return [sum(values) / len(values) for values in by_epoch.values()]
