"""Quantised checkpoints: refused before anything is loaded, or computed as the stock quantised model computes them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridkv.engine.loading import model_files, quantization
from hybridkv.engine.loading.checkpoint import LoadedModel, load
from hybridkv.engine.loading.identity import model_identity
from hybridkv.engine.loading.packing import can_pack
from hybridkv.engine.loading.quantization import METHODS, Method, computing_dtype, is_quantized
from hybridkv.errors import ConfigError, InputError
from hybridkv.models.compute import compute_of
from hybridkv.models.reader import load_model
from tests.engine import drive
from tests.engine.drive import Driver
from tests.engine.zoo import build, family_config, fresh, prompt


def methods() -> list[str]:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    return sorted(AUTO_QUANTIZER_MAPPING)


def stated(method: str) -> dict[str, Any]:
    """The quantization_config that a checkpoint of this method has, as far as the refusals read it."""
    kind, _, width = method.partition("_")
    return {"quant_method": kind, f"load_in_{width}": True} if kind == "bitsandbytes" else {"quant_method": method}


def write_config(directory: Path, quantization_config: Any, family: str = "llama") -> None:
    """A checkpoint without weights: nothing but its config can have been read when it is refused."""
    directory.mkdir(exist_ok=True)
    config = family_config(family).to_dict() | {"quantization_config": quantization_config}
    (directory / "config.json").write_text(json.dumps(config, default=str))


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("the checkpoint has been loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of quantisation is installed."""
    real = metadata.version

    def version(name: str) -> str:
        if any(name in method.packages for method in METHODS.values()):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("method", methods())
def test_every_method_of_transformers_is_known(method: str) -> None:
    """A new one fails here: find out what it needs, run a tiny checkpoint, and add it to METHODS."""
    assert method in METHODS


@pytest.mark.usefixtures("nothing_is_loaded", "bare")
@pytest.mark.parametrize("method", [name for name in methods() if METHODS.get(name) not in (None, Method())])
def test_what_cannot_run_is_refused_by_name(method: str, tmp_path: Path) -> None:
    write_config(tmp_path, stated(method))
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, device="cpu")
    told = str(refused.value)
    needs = METHODS[method]
    assert repr(method) in told
    assert str(tmp_path) in told
    assert "name a checkpoint" in told
    if needs.never:
        assert needs.never in told
    elif needs.needs_gpu:
        assert "needs a GPU" in told
    else:
        assert f"pip install {' '.join(needs.packages)}" in told


@pytest.mark.usefixtures("nothing_is_loaded", "bare")
@pytest.mark.parametrize("method", sorted(name for name, one in METHODS.items() if one.needs_gpu))
def test_a_gpu_still_needs_the_packages(method: str) -> None:
    with pytest.raises(ConfigError, match=METHODS[method].packages[0]):
        quantization._check_method(method, "cannot load 'x'", torch.device("cuda"))


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("written", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ({"bits": 4}, "its quant_method is None"),
        ({}, "its quant_method is None"),
        ({"quant_method": 7}, "'7'"),
        ("fp8", "'fp8', not an object"),
        ([1], "not an object"),
    ],
)
def test_an_unknown_quantisation_is_refused(written: Any, named: str, tmp_path: Path) -> None:
    write_config(tmp_path, written)
    with pytest.raises(ConfigError, match="cannot load") as refused:
        load(tmp_path, device="cpu")
    assert named in str(refused.value)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_method_that_only_a_newer_transformers_knows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "brand_new", object)
    write_config(tmp_path, {"quant_method": "brand_new"})
    with pytest.raises(ConfigError, match="does not know its quantisation 'brand_new'"):
        load(tmp_path, device="cpu")


@pytest.mark.usefixtures("nothing_is_loaded")
def test_an_error_of_a_package_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise NameError("name 'QuantizeConfig' is not defined")

    monkeypatch.setattr(quantization, "_is_installed", lambda package: True)
    monkeypatch.setattr("transformers.quantizers.auto.AutoHfQuantizer.from_config", broken)
    write_config(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"'gptq' does not run here: name 'QuantizeConfig' is not defined; name a"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("kind", [AttributeError, NotImplementedError, AssertionError])
def test_an_error_while_loading_is_one_clear_error(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise kind("'Linear' object has no attribute 'qweight'")

    monkeypatch.setattr(model_files, "prepare_quantization", lambda *args: "gptq")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", broken)
    write_config(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=rf"its quantisation 'gptq' failed: {kind.__name__}: .*qweight"):
        load(tmp_path, device="cpu")


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("strategy", ["tensor", None])
def test_one_scale_for_all_tokens_of_a_step_is_refused(strategy: str | None, tmp_path: Path) -> None:
    inputs = {"dynamic": True, "num_bits": 8, "type": "float", "strategy": strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": inputs}}
    found = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(ConfigError, match="replies would depend on other requests"):
        quantization._check_activations(found, f"cannot load '{tmp_path}'")
    inputs["strategy"] = "token"
    quantization._check_activations(found, f"cannot load '{tmp_path}'")


@pytest.mark.usefixtures("nothing_is_loaded")
def test_quantised_weights_without_a_word_in_the_config_are_refused(tmp_path: Path) -> None:
    """transformers reads them as plain weights, without their scales, and reports nothing."""
    save_fp8(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"q?_proj\.weight has the type F8_E4M3, and its config.json no"):
        load(tmp_path, device="cpu")


def test_plans_of_a_quantised_checkpoint_count_what_its_cache_keeps(tmp_path: Path) -> None:
    """Keys and values have the computing dtype, whatever the weights have."""
    write_config(tmp_path / "fp8", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    (tmp_path / "plain").mkdir()
    family_config("llama").save_pretrained(tmp_path / "plain")
    quantised, plain = load_model(tmp_path / "fp8"), load_model(tmp_path / "plain")
    assert quantised.layers == plain.layers
    assert compute_of(tmp_path / "fp8") == replace(compute_of(tmp_path / "plain"), name="fp8")


# Checkpoints that run on a CPU, made here by the packages that run them. Without a package its tests are skipped.


def save_fp8(directory: Path, family: str = "llama") -> None:
    """Blocks of 128 x 128 with a scale each, as DeepSeek-V3's."""
    tensors = {}
    for name, weight in build(family).state_dict().items():
        tensors[name] = weight.clone()
        if name.endswith("_proj.weight") and weight.dim() == 2:
            blocks = [-(-size // 128) for size in weight.shape]
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale_inv")] = scale.expand(blocks).clone()
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})


def save_mxfp4(directory: Path) -> None:
    """Experts in 4 bits with a scale for each 32, as those of gpt-oss."""
    chance = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in build("gpt_oss").state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight.clone()
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=chance, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(shape, 123, dtype=torch.uint8)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write_config(directory, {"quant_method": "mxfp4", "modules_to_not_convert": skipped}, "gpt_oss")


def save_by_transformers(directory: Path, family: str, **options: Any) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = directory.with_name(f"{directory.name}-plain")
    build(family).save_pretrained(plain)
    made = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**options)
    )
    made.save_pretrained(directory)


def save_compressed(directory: Path, bits: int, **activations: Any) -> None:
    """int4 packed in groups of 32, or int8 by output channel."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )

    form = "pack-quantized" if bits == 4 else "int-quantized"
    cut = {"strategy": "group", "group_size": 32} if bits == 4 else {"strategy": "channel"}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=bits, type="int", symmetric=True, **cut),
        input_activations=QuantizationArgs(num_bits=8, type="int", **activations) if activations else None,
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=form,
        quantization_status=QuantizationStatus.FROZEN,
    )
    model = fresh("llama")
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.unflatten(1, (-1, 32 if bits == 4 else module.weight.shape[1]))
            module.weight_scale.data.copy_(groups.abs().amax(-1) / (2 ** (bits - 1) - 1))
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)


def save(name: str, directory: Path) -> None:
    """Make a checkpoint, or skip the test if a package that it needs is absent."""
    kind, _, family = name.partition(" ")
    packages = {
        "bnb": ("bitsandbytes", "accelerate"),
        "fp8": ("accelerate",),
        "mxf": ("accelerate",),
        "int": ("compressed_tensors",),
    }
    for package in packages[kind[:3]]:
        pytest.importorskip(package)
    if kind == "fp8":
        save_fp8(directory, family)
    elif kind == "mxfp4":
        save_mxfp4(directory)
    elif kind == "int4":
        save_compressed(directory, 4)
    elif kind == "int8":
        save_compressed(directory, 8, strategy="token", dynamic=True)
    elif kind == "bnb4":
        four = {"bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_quant_type": "nf4"}
        save_by_transformers(directory, family, load_in_4bit=True, bnb_4bit_use_double_quant=True, **four)
    else:  # a threshold takes columns out of the products if any token of a step is large there
        save_by_transformers(directory, family, load_in_8bit=True, llm_int8_threshold=0.0)


CHECKPOINTS = [
    "bnb4 llama",
    "bnb4 qwen3_next",
    "bnb4 falcon_h1",
    "bnb4 mixtral",
    "bnb8 llama",
    "fp8 llama",
    "int4 llama",
    "int8 llama",
    "mxfp4 gpt_oss",
]
EXPANDED = ("fp8", "mxfp4")


def drive_checkpoint(loaded: LoadedModel, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver of a loaded checkpoint, beside what transformers makes of the same directory."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    monkeypatch.setattr(drive, "load", lambda *args, **options: loaded)
    return Driver(stock)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_the_stock_quantised_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside each other and in chunks, decoding, and a prompt that resumes where another left its state."""
    save(name, tmp_path / "model")
    loaded = load(tmp_path / "model", device="cpu", dtype="float32", with_identity=True)
    assert is_quantized(loaded.model) == (not name.startswith(EXPANDED))
    assert loaded.spec.dtype.value == "float32"
    assert not is_quantized(loaded.model) or not can_pack(loaded.model)
    driver = drive_checkpoint(loaded, tmp_path / "model", monkeypatch)
    for number in range(3):
        driver.add(f"first {number}", prompt(70 + 13 * number))
    driver.run()
    driver.add("again", prompt(96))
    driver.run()
    assert driver.results["again"].cached_tokens >= 64


@pytest.mark.parametrize("name", ["bnb4 llama", "bnb8 llama", "fp8 llama", "int4 llama"])
def test_identities_cover_weights_scales_and_config(name: str, tmp_path: Path) -> None:
    save(name, directory := tmp_path / "model")
    first = load(directory, device="cpu", dtype="float32", with_identity=True)
    again = load(directory, device="cpu", dtype="float32", with_identity=True)
    assert model_identity(first.model) == model_identity(again.model)
    assert first.store_identity == again.store_identity
    assert first.identity == again.identity
    assert bool(first.identity) == is_quantized(first.model)

    build("llama").save_pretrained(tmp_path / "plain")
    plain = load(tmp_path / "plain", device="cpu", dtype="float32", with_identity=True)
    seen = {(model_identity(one.model), one.store_identity) for one in (first, plain)}
    tensors = load_file(directory / "model.safetensors")
    scale = next(key for key in tensors if key.endswith(("scale_inv", "weight_scale", "absmax", "SCB")))
    changed = tensors[scale].clone()
    changed.flatten()[0] += 1
    save_file(tensors | {scale: changed}, directory / "model.safetensors", metadata={"format": "pt"})
    other = load(directory, device="cpu", dtype="float32", with_identity=True)
    seen.add((model_identity(other.model), other.store_identity))
    assert len({one for one, _ in seen}) == len({one for _, one in seen}) == 3


def test_the_config_of_a_quantisation_is_part_of_both_identities(tmp_path: Path) -> None:
    """The same bytes with another config are another model."""
    save("bnb8 llama", directory := tmp_path / "model")
    first = load(directory, device="cpu", with_identity=True)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["llm_int8_threshold"] = 6.0
    (directory / "config.json").write_text(json.dumps(config))
    second = load(directory, device="cpu", with_identity=True)
    assert first.store_identity != second.store_identity
    assert first.identity != second.identity


def test_a_quantised_model_in_memory_is_taken_over_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save("bnb4 llama", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with pytest.raises(InputError, match=r"bfloat16.*quantised \(bitsandbytes_4bit\) cannot be converted"):
        load(model, device="cpu", dtype="bfloat16")
    loaded = load(model, device="cpu", dtype="float32")
    assert loaded.model is model
    assert loaded.identity
    assert loaded.spec.dtype.value == "float32"


def test_the_computing_dtype_is_not_that_of_some_weight(tmp_path: Path) -> None:
    """A config without a dtype, and a first weight in float8."""
    save("fp8 llama", directory := tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config.pop("dtype", None)
    (directory / "config.json").write_text(json.dumps(config))
    loaded = load(directory, device="cpu")
    assert computing_dtype(loaded.model) in (torch.bfloat16, torch.float32)
    assert loaded.spec.dtype.value in ("bfloat16", "float32")
