"""A folder with only an adapter is its base with the adapter merged in; one with a model and an adapter is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridkv.engine.loading.checkpoint import load
from hybridkv.engine.loading.identity import model_identity
from hybridkv.errors import ConfigError
from tests.engine import drive
from tests.engine.checkpoints import save_checkpoint
from tests.engine.drive import Driver
from tests.engine.lora import save_adapter
from tests.engine.zoo import ALL, build, oracle_logits, prompt

FAMILIES = ["llama", "qwen3_next", "falcon_h1"]


def save_both(home: Path, family: str, base: str, **config: Any) -> Any:
    """The base in home/base, and its adapter in home/adapter; returns peft's model of both."""
    pytest.importorskip("peft")
    save_checkpoint(family, home / "base")
    adapted = save_adapter(build(family), home / "adapter", 1, scale=ALL[family].branch_scale, **config)
    set_base(home / "adapter", base)
    return adapted


def set_base(adapter: Path, base: str | None) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_peft(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = save_both(tmp_path, family, "../base")
    stock = adapted.merge_and_unload()
    loaded = load(tmp_path / "adapter", device="cpu", dtype="float32")
    assert loaded.spec.name == "adapter"
    assert loaded.tokenizer is not None  # the base's
    monkeypatch.setattr(drive, "load", lambda *args, **options: loaded)
    driver = Driver(stock)
    for number in range(2):
        driver.add(f"first {number}", prompt(70 + 13 * number))
    driver.run()
    driver.add("again", prompt(83))
    driver.run()
    assert driver.results["again"].cached_tokens >= 64
    moved = oracle_logits(stock, prompt(40)) - oracle_logits(build(family), prompt(40))
    assert float(moved.abs().max()) > 0.05  # the adapter does something


def test_identities_tell_base_and_adapters_apart(tmp_path: Path) -> None:
    save_both(tmp_path, "llama", str(tmp_path / "base"))
    save_adapter(build("llama"), tmp_path / "other", 2)
    set_base(tmp_path / "other", str(tmp_path / "base"))
    names = ("base", "adapter", "other", "adapter")
    found = [load(tmp_path / name, device="cpu", dtype="float32", with_identity=True) for name in names]
    assert found[1].store_identity == found[3].store_identity
    assert len({one.store_identity for one in found}) == 3
    assert len({one.identity or model_identity(one.model) for one in found}) == 3


@pytest.mark.parametrize(
    ("base", "told"),
    [
        ("../gone", r"no directory '.*adapter/\.\./gone'; get the base, and set base_model_name_or_path"),
        ("someone/model", r"has the base 'someone/model', and there is no directory '.*adapter/someone/model'"),
        (None, "does not name its base"),
        (".", "is an adapter itself"),
    ],
)
def test_a_base_that_is_not_there_is_named(base: str | None, told: str, tmp_path: Path) -> None:
    save_both(tmp_path, "llama", "../base")
    set_base(tmp_path / "adapter", base)
    with pytest.raises(ConfigError, match=told):
        load(tmp_path / "adapter", device="cpu")


def test_a_folder_with_a_model_and_an_adapter_is_refused(tmp_path: Path) -> None:
    """transformers would use the adapter if peft is installed, and leave it out if not."""
    save_both(tmp_path, "llama", "../base")
    for file in (tmp_path / "adapter").iterdir():
        file.rename(tmp_path / "base" / file.name)
    with pytest.raises(ConfigError, match="holds a model and an adapter"):
        load(tmp_path / "base", device="cpu")


def test_a_config_beside_an_adapter_changes_nothing(tmp_path: Path) -> None:
    """Some tools save the base's config.json with the adapter, without its weights."""
    save_both(tmp_path, "llama", "../base")
    alone = load(tmp_path / "adapter", device="cpu", dtype="float32", with_identity=True)
    (tmp_path / "adapter" / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
    beside = load(tmp_path / "adapter", device="cpu", dtype="float32", with_identity=True)
    assert beside.store_identity == alone.store_identity


def test_an_adapter_is_not_merged_into_quantised_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_both(tmp_path, "llama", "../base")
    monkeypatch.setattr("hybridkv.engine.adapters.folder.is_quantized", lambda model: True)
    monkeypatch.setattr("hybridkv.engine.adapters.folder.quantization_of", lambda model: "gptq")
    with pytest.raises(ConfigError, match=r"cannot merge adapter .* quantised \(gptq\); name a base"):
        load(tmp_path / "adapter", device="cpu")


def test_a_variant_of_lora_is_refused_by_name(tmp_path: Path) -> None:
    save_both(tmp_path, "llama", "../base")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    with pytest.raises(ConfigError, match="use_dora"):
        load(tmp_path / "adapter", device="cpu")
