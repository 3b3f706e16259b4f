"""Packed weights say what plain ones say, to the rounding of their dtype, and nothing reads a weight that is gone."""

from __future__ import annotations

import platform
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hybridkv import Engine
from hybridkv.engine.loading import packing
from hybridkv.engine.loading.packing import PackedLinear, can_pack, pack_weights
from tests.engine.checkpoints import save_checkpoint
from tests.engine.drive import GREEDY
from tests.engine.zoo import FAMILIES, fresh, prompt

HAS_BF16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
IS_ARM = platform.machine() == "aarch64"
DTYPES = [torch.bfloat16] * HAS_BF16 + [torch.float32] * IS_ARM
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}

pytestmark = pytest.mark.skipif(not DTYPES, reason="this CPU gains nothing from packed weights")
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="this CPU does not compute in bfloat16")
needs_arm = pytest.mark.skipif(not IS_ARM, reason="float32 weights are packed on ARM alone")


def in_dtype(family: str, dtype: torch.dtype) -> Any:
    return fresh(family).to(dtype)


def num_packed(model: Any) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def logits(model: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt(60, 1)]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_linear_layer(dtype: torch.dtype, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(96, 72, bias=bias).to(dtype), torch.randn(2, rows, 96).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_packed(family: str, dtype: torch.dtype) -> None:
    plain = logits(in_dtype(family, dtype))
    model = in_dtype(family, dtype)
    pack_weights(model)
    assert num_packed(model)
    difference = (logits(model) - plain).abs()
    if dtype == torch.float32:
        assert float(difference.max()) < 1e-4
    assert float(difference.median()) < 0.05  # where a router's choice is close, single tokens may differ by more
    with Engine(model, memory="8MiB", device="cpu", max_num_batched_tokens=32, max_num_seqs=4) as engine:
        first, again = (engine.generate(prompt(60, 1), GREEDY, progress=False)[0] for _ in range(2))
    assert again.cached_tokens == 48
    assert len(first.token_ids) == 8


@needs_bf16
@pytest.mark.parametrize("rows", [1, 3, 50])  # of one row, most experts get nothing
@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "deepseek_v3"])
def test_packed_experts_say_what_the_stock_ones_say(family: str, rows: int) -> None:
    plain, packed = (in_dtype(family, torch.bfloat16) for _ in range(2))
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_that_is_the_embedding_is_copied_only_where_that_is_little(dtype: torch.dtype) -> None:
    tied = in_dtype("gemma3", dtype)
    embedding = tied.get_input_embeddings().weight
    assert tied.lm_head.weight is embedding
    with patch.object(packing, "_COPY_SHARE", 10**6):
        pack_weights(tied)
    assert tied.lm_head.weight is embedding
    with patch.object(packing, "_COPY_SHARE", 1):
        pack_weights(tied)
    assert isinstance(tied.lm_head, PackedLinear)
    assert tied.get_input_embeddings().weight is embedding


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_layers_share_is_packed_once(dtype: torch.dtype) -> None:
    model = in_dtype("zamba2", dtype)
    hybrids = [layer.shared_transformer for layer in model.model.layers if hasattr(layer, "shared_transformer")]
    assert len(hybrids) == 2
    with patch.object(packing, "_pack", wraps=packing._pack) as pack:
        pack_weights(model)
    assert pack.call_count < num_packed(model)
    for first, second in zip(*(one.modules() for one in hybrids), strict=True):
        if isinstance(first, PackedLinear):
            assert first.packed is second.packed


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_weights_are_let_go_one_by_one(dtype: torch.dtype) -> None:
    model = in_dtype("llama", dtype)
    plain = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    alive: list[int] = []
    pack = packing._pack

    def watched(weight: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in plain))
        return pack(weight)

    with patch.object(packing, "_pack", watched):
        pack_weights(model)
    assert alive == list(range(len(plain), 0, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_weights_of_the_engine_are_packed(dtype: torch.dtype, tmp_path: Any) -> None:
    save_checkpoint("llama", tmp_path)
    name = str(dtype).removeprefix("torch.")
    with Engine(tmp_path, memory="4MiB", device="cpu", dtype=name) as engine:
        assert num_packed(engine._core.runner.model)
    model = in_dtype("llama", dtype)
    with Engine(model, memory="4MiB", device="cpu"):
        assert not num_packed(model)  # it is the caller's


@needs_bf16
def test_bfloat16_is_packed_where_the_cpu_computes_in_it() -> None:
    assert can_pack(in_dtype("llama", torch.bfloat16))
    assert can_pack(in_dtype("llama", torch.float32)) == IS_ARM


@needs_arm
def test_float32_is_packed_unless_requests_come_one_at_a_time(tmp_path: Any) -> None:
    model = fresh("llama")
    assert can_pack(model)
    assert not can_pack(model, is_alone=True)
    save_checkpoint("qwen3_next", tmp_path)
    with Engine(tmp_path, memory="4MiB", device="cpu", dtype="float32", max_num_seqs=1) as engine:
        assert not num_packed(engine._core.runner.model)
    with Engine(tmp_path, memory="4MiB", device="cpu", dtype="float32") as engine:
        served = engine._core.runner.model
        assert num_packed(served)
        assert not any(hasattr(module, "packed_up") for module in served.modules())  # experts get a token or two
