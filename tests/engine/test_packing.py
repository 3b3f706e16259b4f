"""Packed weights say what plain ones say, to the rounding of bfloat16, and nothing reads a weight that is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hybridkv import Engine
from hybridkv.engine.packing import PackedLinear, can_pack, pack_weights
from tests.engine.checkpoints import save_checkpoint
from tests.engine.drive import GREEDY
from tests.engine.zoo import FAMILIES, fresh, prompt

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU does not compute in bfloat16"
)


def in_bf16(family: str) -> Any:
    return fresh(family).to(torch.bfloat16)


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt(60, 1)]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_a_packed_linear_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(96, 72, bias=bias).bfloat16(), torch.randn(2, rows, 96).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_packed(family: str) -> None:
    plain = logits(in_bf16(family))
    model = in_bf16(family)
    pack_weights(model)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    difference = (logits(model) - plain).abs()
    assert float(difference.median()) < 0.05  # where a router's choice is close, single tokens may differ by more
    with Engine(model, memory="8MiB", device="cpu", max_step_tokens=32, max_running=4) as engine:
        first, again = (engine.generate(prompt(60, 1), GREEDY, progress=False)[0] for _ in range(2))
    assert again.cached_tokens == 48
    assert len(first.token_ids) == 8


@pytest.mark.parametrize("rows", [1, 3, 50])  # of one row, most experts get nothing
@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "deepseek_v3"])
def test_packed_experts_say_what_the_stock_ones_say(family: str, rows: int) -> None:
    plain, packed = in_bf16(family), in_bf16(family)
    pack_weights(packed)
    stock, ours = (next(m for m in model.modules() if hasattr(m, "num_experts") and hasattr(m, "down_proj"))
                   for model in (plain, packed))  # fmt: skip
    assert len(ours.packed_up) == len(ours.packed_down) == stock.num_experts
    assert ours.down_proj is None
    x = torch.randn(rows, 64).bfloat16()
    index = torch.stack([torch.randperm(stock.num_experts)[:2] for _ in range(rows)])
    weights = torch.rand(rows, 2).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, index, weights), stock(x, index, weights), rtol=5e-2, atol=5e-2)


def test_only_what_there_is_to_gain_from_is_packed(tmp_path: Any) -> None:
    assert not can_pack(fresh("llama"))
    assert can_pack(in_bf16("llama"))
    save_checkpoint("llama", tmp_path)
    with Engine(tmp_path, memory="4MiB", device="cpu", dtype="bfloat16") as engine:
        assert any(isinstance(module, PackedLinear) for module in engine.core.runner.model.modules())
    model = in_bf16("llama")
    with Engine(model, memory="4MiB", device="cpu"):
        assert not any(isinstance(module, PackedLinear) for module in model.modules())  # it is the caller's
