"""Accelerators by name, and their arithmetic."""

from __future__ import annotations

import pytest

from hybridkv.errors import HybridKVError
from hybridkv.models import compute_of
from hybridkv.replay.accelerators import ACCELERATORS, Accelerator, accelerator

QWEN = compute_of("qwen3.5-397b-a17b")
LLAMA = compute_of("llama-3.1-8b")


def test_names_are_found_in_any_case() -> None:
    assert accelerator("H200") is accelerator(" h200 ") is ACCELERATORS["h200"]
    with pytest.raises(HybridKVError, match="unknown accelerator 'tpu': choose one of a100, h100, h200"):
        accelerator("tpu")


@pytest.mark.parametrize("device", ACCELERATORS.values(), ids=lambda device: device.name)
def test_figures_are_in_bounds(device: Accelerator) -> None:
    """Balance of computing and memory: 37 (made for decoding) to 600 FLOPs a byte."""
    assert 100e12 < device.flops < 3e15
    assert 30 < device.flops / device.memory_bytes_per_s < 600


def test_prefill_is_flops_over_what_the_devices_reach() -> None:
    device = Accelerator("d", flops=1e15, memory_bytes_per_s=1e12, utilisation=0.5)
    assert device.prefill_seconds(QWEN, 0, 8192, tp=4) == pytest.approx(QWEN.flops(0, 8192) / 2e15)
    assert device.prefill_seconds(QWEN, 8192, 8192) == 0
    assert device.prefill_seconds(QWEN, 4096, 8192) < device.prefill_seconds(QWEN, 0, 8192)


def test_decode_reads_the_weights_once_a_step() -> None:
    device = Accelerator("d", flops=1e15, memory_bytes_per_s=4e12)
    alone = device.decode_tokens_per_s(LLAMA)
    assert alone == pytest.approx(4e12 / (2 * LLAMA.active_parameters))
    assert device.decode_tokens_per_s(LLAMA, tp=2, weight_bytes=1) == pytest.approx(4 * alone)
    assert device.decode_tokens_per_s(LLAMA, batch=64) > 50 * alone


def test_a_batch_of_an_expert_model_reads_more_weights() -> None:
    device = accelerator("h200")
    alone = device.decode_tokens_per_s(QWEN, tp=8)
    assert device.decode_tokens_per_s(QWEN, tp=8, batch=2) == pytest.approx(alone)
    assert device.decode_tokens_per_s(QWEN, tp=8, batch=256) > 5 * alone


def test_bad_numbers_are_refused() -> None:
    device = accelerator("h100")
    with pytest.raises(HybridKVError, match="tensor-parallel size 0"):
        device.prefill_seconds(LLAMA, 0, 1, tp=0)
    with pytest.raises(HybridKVError, match="batch 0"):
        device.decode_tokens_per_s(LLAMA, batch=0)
