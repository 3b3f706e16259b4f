"""Compiled layers say what the stock model says, in few graphs, and give way where they cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from hybridkv import Engine
from hybridkv.engine import compiling
from hybridkv.engine.compiling import compile_layers
from hybridkv.engine.loading.families import COMPILED
from hybridkv.engine.loading.packing import can_pack, pack_weights
from hybridkv.engine.runner import decoder_layers
from hybridkv.errors import HybridKVError
from tests.devices import DEVICES
from tests.engine.drive import GREEDY, Driver, check_greedy
from tests.engine.test_seams import Recorder, modeling_file
from tests.engine.zoo import FAMILIES, build, fresh, prompt, text_config

KINDS_OF_LAYERS = {
    "qwen3_next": 2,
    "deepseek_v3": 2,
    "nemotron_h": 4,
    "jamba": 3,
    "zamba2": 3,
    "kimi_linear": 3,
    "mimo_v2_flash": 3,
    "laguna": 4,
    "bailing_hybrid": 3,
    "lfm2_moe": 3,
    **dict.fromkeys(("glm4_moe_lite", "mistral4", "axk1", "lfm3"), 2),
    **dict.fromkeys(("qwen2_moe", "smollm3", "granite_swa", "qwen3_vl_moe", "muse_glimmer", "muse_spark"), 2),
} | dict.fromkeys(("qwen3_5", "qwen3_5_moe", "bamba", "granitemoehybrid", "lfm2", "olmo_hybrid", "minimax"), 2)
"""Those of the tiny models; one kind where nothing is said."""

WITH_KERNELS = ["llama", "qwen3_next"]
TRACED = ["falcon_h1", "deepseek_v3", "kimi_linear"]
REST = [name for name, family in FAMILIES.items() if family.model_type in COMPILED]
REST = [name for name in REST if name not in (*WITH_KERNELS, *TRACED)]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not compiling._has_cpp_compiler(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced and lowered as usual, but torch's own kernels run them: a C++ compiler takes half a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def compiled(family: str, device: str = "cpu", **options: Any) -> Driver:
    driver = Driver(build(family), device=device, **options)
    driver.runner.compile(True)
    return driver


def check_family(family: str, device: str) -> None:
    driver = compiled(family, device, max_num_batched_tokens=48)
    driver.add("long", prompt(150, 1))
    driver.add("short", prompt(5, 2), replace(GREEDY, max_tokens=30))
    for _ in range(2):
        driver.step()
    driver.add("one", prompt(1, 4))
    driver.run()
    driver.add("again", prompt(150, 1))
    results = driver.run()
    for name in results:
        check_greedy(driver, name)
    assert {name: result.finish_reason for name, result in results.items()} == dict.fromkeys(results, "length")
    assert results["again"].cached_tokens == 144
    # One for single tokens, one for any other number of them: no layer and no step compiles anew.
    assert counters["stats"]["unique_graphs"] == 2 * KINDS_OF_LAYERS.get(family, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", WITH_KERNELS)
def test_every_logit_is_the_stock_models_and_graphs_are_few(family: str, device: str) -> None:
    check_family(family, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "backend"), [*product(TRACED, ["aot_eager"]), *product(REST, ["eager"])])
def test_so_it_is_with_the_traces_of_all_others(
    family: str, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as usual, some also lowered to plain operations, but run by torch's own kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    check_family(family, device)


@pytest.mark.usefixtures("traced")
def test_observers_see_every_compiled_layer() -> None:
    driver, recorder = compiled("llama"), Recorder()
    driver.runner.observe(recorder)
    driver.add("a", prompt(20, 1))
    driver.step()
    count = text_config(driver.model).num_hidden_layers
    assert recorder.seen == [(when, layer) for layer in range(count) for when in ("before", "after")]
    assert counters["stats"]["unique_graphs"] == 1


def test_what_others_compile_stays_stock() -> None:
    conv = modeling_file(compiled("qwen3_next").runner.model).causal_conv1d_fn
    x, weight = torch.randn(1, 6, 9), torch.randn(6, 4)
    assert conv.hybridkv_stock is not None
    ours = torch.compile(conv, backend="eager", fullgraph=True)(x, weight, activation="silu")
    torch.testing.assert_close(ours, conv.hybridkv_stock(x, weight, activation="silu"))


@pytest.mark.usefixtures("traced")
def test_a_closed_runner_leaves_plain_layers() -> None:
    driver = compiled("llama")
    layers = decoder_layers(driver.runner.model)
    assert all("forward" in vars(layer) for layer in layers)
    driver.runner.close()
    assert not any("forward" in vars(layer) for layer in layers)


@pytest.mark.usefixtures("traced")
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU does not compute in bfloat16")
def test_packed_weights_and_experts_compile() -> None:
    model = fresh("qwen3_next").to(torch.bfloat16)
    assert can_pack(model)
    pack_weights(model)
    with Engine(model, memory="8MiB", device="cpu", max_num_batched_tokens=32, max_num_seqs=4) as engine:
        [plain] = engine.generate(prompt(60, 1), replace(GREEDY, logprobs=1), progress=False)
    with Engine(model, memory="8MiB", device="cpu", max_num_batched_tokens=32, max_num_seqs=4, compile=True) as engine:
        [ours] = engine.generate(prompt(60, 1), replace(GREEDY, logprobs=1), progress=False)
    assert counters["stats"]["unique_graphs"] == 4
    assert plain.logprobs is not None
    assert ours.logprobs is not None
    assert abs(plain.logprobs[0].chosen - ours.logprobs[0].chosen) < 0.1


# --- where it cannot be -----------------------------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "hybridkv.engine")
    return caplog


def refused(family: str, compile: bool | None, device: str = "cpu") -> Any:
    model = fresh(family)
    return compile_layers(model, decoder_layers(model), compile, torch.device(device))


def test_by_default_a_cpu_is_left_alone(log: pytest.LogCaptureFixture) -> None:
    assert refused("llama", None) is None
    assert not log.messages


def test_a_family_that_cannot_be_traced_is_said_once_or_refused(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    assert refused("llama4", None, "cuda") is None
    [line] = log.messages
    assert "not compiled: layers of type 'llama4_text'" in line
    with pytest.raises(HybridKVError, match="compile=True: layers of type 'llama4_text' cannot be compiled; leave it"):
        refused("llama4", True)


def test_no_compiler_is_said_once_or_refused(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert refused("llama", None, "cuda") is None
    assert [line for line in log.messages if "no Triton" in line] == log.messages != []
    monkeypatch.setattr(compiling, "_has_cpp_compiler", lambda: False)
    with pytest.raises(HybridKVError, match=r"no C\+\+ compiler"):
        refused("llama", True)


def failing(driver: Driver, is_forced: bool) -> None:
    """The compiler gives up on the second layer."""

    def give_up(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported("a thing it does not know\nand more")

    layers = decoder_layers(driver.runner.model)
    compiling.CompiledLayers(layers, is_forced=is_forced)
    layers[1].forward._run = give_up


@pytest.mark.usefixtures("traced")
def test_a_model_that_was_asked_for_hidden_states_compiles(log: pytest.LogCaptureFixture) -> None:
    model = fresh("llama")
    model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    driver = Driver(model, compiles=True)
    driver.add("a", prompt(20, 1))
    driver.run()
    assert not [record for record in log.records if record.name == "hybridkv.engine"]


@pytest.mark.usefixtures("traced")
def test_a_layer_that_fails_to_compile_is_said_once_and_nobody_notices(log: pytest.LogCaptureFixture) -> None:
    driver = Driver(build("llama"))
    failing(driver, is_forced=False)
    driver.add("a", prompt(20, 1))
    driver.run()  # every logit is compared
    told = [record.getMessage() for record in log.records if record.name == "hybridkv.engine"]
    assert told == ["layers are not compiled: layer 1 cannot be: a thing it does not know"]
    assert driver.results["a"].finish_reason == "length"
    assert not any("forward" in vars(layer) for layer in decoder_layers(driver.runner.model))


@pytest.mark.usefixtures("traced")
def test_a_layer_that_fails_to_compile_when_it_must_is_an_error() -> None:
    driver = Driver(build("llama"))
    failing(driver, is_forced=True)
    driver.add("a", prompt(20, 1))
    while not driver.results:
        for update in driver.core.step():
            if update.result is not None:
                driver.results["a"] = update.result
    [completion] = driver.results["a"].completions
    assert completion.finish_reason == "error"
    assert "layer 1 cannot be compiled" in str(completion.error)


@pytest.mark.parametrize("value", ["yes", "auto", 0, 1])
def test_nonsense_is_refused_before_a_model_is_loaded(value: Any) -> None:
    with pytest.raises(HybridKVError, match="pass True or False, or None"):
        Engine("/nowhere", compile=value)
