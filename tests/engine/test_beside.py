"""flash-linear-attention in the same environment: nothing that the engine or its oracle computes changes.

`make test` runs this with the package on PYTHONPATH, and skips it in its other runs.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
import transformers

from hybridkv import Engine
from hybridkv.engine.loading.checkpoint import load
from hybridkv.errors import ConfigError
from tests.engine.checkpoints import save_checkpoint
from tests.engine.drive import GREEDY, Driver, check_greedy
from tests.engine.test_seams import NAMES, modeling_file
from tests.engine.zoo import NOT_INSTALLED, build, fresh, prompt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention")


@pytest.mark.parametrize("family", sorted(NAMES.keys() - NOT_INSTALLED))
def test_every_logit_is_that_of_torchs_functions(family: str) -> None:
    driver = Driver(build(family), max_num_batched_tokens=48)
    driver.add("long", prompt(90, 1))
    driver.add("short", prompt(5, 2))
    for name in driver.run():
        check_greedy(driver, name)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "olmo_hybrid"])
def test_models_do_take_its_kernels(family: str) -> None:
    """Else this file tests nothing."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as choose

    name = "chunk_kda" if family == "kimi_linear" else "chunk_gated_delta_rule"
    chosen = inspect.getclosurevars(choose(name, "fla")(lambda: None)).nonlocals["implementation"]
    assert chosen.__module__.startswith("fla.")


def test_mamba2_is_transformers_own(tmp_path: Path) -> None:
    import fla.models

    assert isinstance(transformers.AutoConfig.for_model("mamba2"), fla.models.Mamba2Config)
    save_checkpoint("mamba2", tmp_path)
    assert type(load(tmp_path, device="cpu").model) is transformers.Mamba2ForCausalLM
    config = fla.models.Mamba2Config(
        num_heads=4, head_dim=8, hidden_size=16, state_size=8, num_hidden_layers=1, vocab_size=50
    )
    with pytest.raises(ConfigError, match=r"fla.*Mamba2ForCausalLM is not transformers' own model of type 'mamba2'"):
        load(fla.models.Mamba2ForCausalLM(config), device="cpu")


def test_an_engine_says_whose_kernels_compute() -> None:
    with Engine(fresh("qwen3_next"), memory="8MiB", device="cpu") as engine:
        engine.generate(prompt(20), GREEDY, progress=False)
        assert engine.stats().kernels == {"prefill": "torch", "decode": "torch"}
        assert engine.kernels.startswith("prefill torch, decode torch; not used: flash-linear-attention")


def test_the_reference_names_torchs_functions() -> None:
    for family in NAMES.keys() - NOT_INSTALLED:
        module = modeling_file(build(family))
        for name in NAMES[family]:
            function = getattr(module, name)
            assert inspect.unwrap(getattr(function, "hybridkv_stock", function)).__module__ == module.__name__
