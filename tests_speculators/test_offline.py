"""Hidden states in files: speculators checks, loads and trains on a folder of them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hs_connectors import FileTransfer
from plain_norm import NORM
from safetensors.torch import load_file
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.cli import create_transformer_layer_config
from speculators.train.dataloader import create_train_val_loaders
from speculators.train.trainer import Trainer, TrainerConfig
from stock_model import DRAFT_LAYERS, LAYERS, StockModel
from training import losses, train

from hybridkv.demo import demo_model

HYBRIDKV = Path(sys.executable).with_name("hybridkv")
"""In this environment: it has `datasets`, with which the command writes what speculators reads beside the states."""
NUM_SAMPLES = 6
EPOCHS = 4


def extract_folder(stock: StockModel, folder: Path) -> list[list[int]]:
    """Writes a dataset and its hidden states. Returns the token ids of every sample."""
    samples = stock.samples(NUM_SAMPLES)
    prompts = folder.with_suffix(".jsonl")
    prompts.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in samples))
    layers = ",".join(map(str, LAYERS))
    command = [str(HYBRIDKV), "extract", str(demo_model()), f"--input={prompts}", f"--layers={layers}"]
    subprocess.run([*command, f"--out={folder}", "--memory=256MiB", "--device=cpu"], check=True)
    return samples


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As close as two orders of the same sums in bfloat16 are."""
    error = (found.float() - expected.float()).square().mean().sqrt()
    assert error <= 0.02 * expected.float().square().mean().sqrt()


@pytest.fixture(scope="module")
def folder(stock: StockModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    extract_folder(stock, folder)
    return folder


def draft_model(verifier: Path) -> Any:
    shape = create_transformer_layer_config(str(verifier), 1, "llama", None, 2048, [])
    return Eagle3DraftModel.from_training_args(
        shape,
        verifier_name_or_path=str(verifier),
        target_layer_ids=list(DRAFT_LAYERS),
        draft_vocab_size=shape.vocab_size,
        norm_before_residual=True,
        draft_attn_impl="eager",
        ttt_steps=2,
    )


def test_its_checker_accepts_every_file(stock: StockModel, folder: Path) -> None:
    states = folder / "hidden_states"
    indices = get_existing_hidden_state_indices(states)
    assert indices == list(range(NUM_SAMPLES))
    assert find_corrupt_hidden_state_indices(states, indices) == {}
    for index, ids in enumerate(stock.samples(NUM_SAMPLES)):
        data = load_file(states / f"hs_{index}.safetensors")
        check_hidden_states(data, ids)
        assert data["hidden_states"].dtype == torch.bfloat16
        assert data["hidden_states"].shape == (len(ids), len(LAYERS), stock.hidden_size)
        assert data["token_ids"].dtype == torch.int64
        assert_close(data["hidden_states"], stock.hidden_states(ids))


def test_its_loader_reads_every_sample(stock: StockModel, folder: Path) -> None:
    """In the order of a batch: the draft's layers side by side, and the last layer apart from them."""
    samples = stock.samples(NUM_SAMPLES)
    width = len(DRAFT_LAYERS) * stock.hidden_size
    loaders = create_train_val_loaders(
        data_path=str(folder),
        total_seq_len=sum(map(len, samples)),
        hidden_states_dtype=torch.bfloat16,
        transfer=FileTransfer(folder / "hidden_states"),
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path="",
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=stock.hidden_size,
        num_target_layers=len(DRAFT_LAYERS),
        num_workers=0,
        prefetch_factor=1,
        preprocess=None,
    )
    read: list[list[int]] = []
    for loader in loaders:
        for batch in loader:
            assert batch["error_records"] == 0
            assert batch["hidden_states"].shape[-1] == width
            for document in range(int(batch["document_ids"].max()) + 1):
                inside = batch["document_ids"][0] == document
                ids = batch["input_ids"][0, inside].tolist()
                expected = stock.hidden_states(ids)
                assert_close(batch["hidden_states"][0, inside], expected[:, :-1].flatten(1))
                assert_close(batch["verifier_last_hidden_states"][0, inside], expected[:, -1])
                read.append(ids)
    assert sorted(read) == sorted(samples)


def test_its_targets_are_the_models_logits(stock: StockModel, verifier: Path) -> None:
    draft = draft_model(verifier)
    for ids in stock.samples(2):
        states, logits = stock.compute(ids)
        targets = draft.verifier_lm_head(draft.verifier_norm(states[:, -1].float()))
        torch.testing.assert_close(targets, logits.float(), rtol=0.02, atol=0.25)


def test_it_still_takes_the_norm_for_a_plain_one(verifier: Path) -> None:
    """Otherwise plain_norm.py is of no use any more."""
    weight = load_file(demo_model() / "model.safetensors")[NORM]
    norm = draft_model(demo_model()).verifier_norm
    torch.testing.assert_close(norm(torch.ones(len(weight))), weight.float(), rtol=1e-4, atol=1e-4)


def test_its_trainer_still_wants_an_accelerator(verifier: Path, tmp_path: Path) -> None:
    """Otherwise `on_cpu` is of no use any more."""
    with pytest.raises(RuntimeError, match="accelerator"):
        Trainer(draft_model(verifier), TrainerConfig(lr=1e-3, num_epochs=1, save_path=str(tmp_path)), train_loader=[])


def test_its_trainer_learns_from_the_files(folder: Path, verifier: Path) -> None:
    steps = train(folder, verifier, "--on-missing=raise", epochs=EPOCHS)
    by_epoch = losses(steps)
    assert len(by_epoch) == EPOCHS
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert all(step["error_records"] == 0 for step in steps)
    assert by_epoch[-1] < by_epoch[0] * 0.9
    assert (folder / "checkpoints" / str(EPOCHS - 1) / "model.safetensors").is_file()
