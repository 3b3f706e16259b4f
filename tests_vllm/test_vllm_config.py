"""Configurations that are refused before weights are loaded: real engines start on models without weights."""

from __future__ import annotations

import inspect
import json
import shutil
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES
from engines import Engine, EngineDiedError, Host, Process, transfer_config
from test_settings import config
from transformers import BertConfig, LlamaConfig
from vllm.config import KVTransferConfig, VllmConfig

from hybridkv.errors import InputError
from hybridkv.integrations import vllm_config
from hybridkv.integrations.vllm_config import WRAPPED, check, install

FILE = "file:///nowhere?size=1GiB"
MEMORY = "memory://?size=1GiB"
MULTIPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
ENDING_S = 120.0
Fails = Callable[..., str]


@pytest.fixture(scope="module")
def fails(host: Host, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Fails:
    """Start an engine without weights. Returns what it says before it ends."""
    directory = tmp_path_factory.mktemp("weightless")
    for name, checkpoint in checkpoints.items():
        (directory / name).mkdir()
        shutil.copy(checkpoint / "config.json", directory / name)
    host.wait_until_started()

    def failed(name: str, **options: Any) -> str:
        engine = Engine(host, FAMILIES[name], directory / name, directory / f"{name}.log", **options)
        with pytest.raises(EngineDiedError) as died:
            engine.wait_until_started()
        engine.close()
        engine.log.unlink()
        return str(died.value)

    return failed


def test_what_is_not_refused_gets_as_far_as_the_weights(fails: Fails) -> None:
    assert "Cannot find any model weights" in fails("qwen3_next", kv_transfer_config=transfer_config([FILE]))


def beside(name: str) -> dict[str, Any]:
    """Our connector in a MultiConnector, after another."""
    other = {"kv_connector": name, "kv_role": "kv_both"}
    extra = {"connectors": [other, transfer_config([FILE])]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(("family", "options", "message"), [
    ("qwen3_next", {"enable_prefix_caching": False}, "without prefix caching: turn it on with --enable-prefix-caching"),
    ("gemma3", {"disable_hybrid_kv_cache_manager": True},
     "is off: leave out --disable-hybrid-kv-cache-manager"),
    ("gemma3", {"kv_transfer_config": beside("ExampleConnector")}, "is off: ExampleConnector beside it"),
    ("gemma3", {"kv_transfer_config": transfer_config([FILE], stagign="1GiB")}, "no setting 'stagign'"),
    ("gemma3", {"kv_transfer_config": transfer_config([MEMORY]), "environment": MULTIPROCESS},
     "different processes here"),
    ("gemma3", {"kv_transfer_config": transfer_config([MEMORY]), "tensor_parallel_size": 2},
     "different processes here"),
], ids=["prefix caching", "hybrid manager", "MultiConnector", "setting", "memory", "memory of ranks"])  # fmt: skip
def test_refused_before_weights_are_loaded(family: str, options: dict[str, Any], message: str, fails: Fails) -> None:
    said = fails(family, **{"kv_transfer_config": transfer_config([FILE]), **options})
    assert message in said
    assert "weights" not in said


def test_a_server_says_why_it_ends(host: Host, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    host.wait_until_started()
    shutil.copy(checkpoints["gemma3"] / "config.json", tmp_path)
    transfer = json.dumps(transfer_config([MEMORY]))
    arguments = [f"--model={tmp_path}", "--skip-tokenizer-init", f"--kv-transfer-config={transfer}"]
    server = Process(host, tmp_path / "log", serve=arguments, environment=MULTIPROCESS)
    server.wait_until_started()
    deadline = time.monotonic() + ENDING_S
    while server.is_alive():
        assert time.monotonic() < deadline, server.last_words()
        time.sleep(0.1)
    last = [line for line in server.last_words().splitlines() if line.strip()]
    assert any("add a tier that they share, such as file:///path" in line for line in last[-4:])
    server.close()


# The plugin itself.


def test_vllm_loads_the_plugin() -> None:
    plugins = entry_points(group="vllm.general_plugins", name="hybridkv")
    assert [plugin.load() for plugin in plugins] == [install], "install hybridkv again: its metadata are old"


def test_the_method_is_called_when_the_configuration_is_settled() -> None:
    source = inspect.getsource(VllmConfig.__post_init__)
    assert (
        source.index("check_and_update_config(") < source.index("supports_hma_config(") < source.index(f"{WRAPPED}()")
    )


def test_the_method_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def verify(config: Any) -> None:
        calls.append("verify")

    monkeypatch.setattr(VllmConfig, WRAPPED, verify)
    monkeypatch.setattr(vllm_config, "check", lambda config: calls.append("check"))
    install()
    install()
    getattr(VllmConfig, WRAPPED)(None)
    assert calls == ["verify", "check"]


def test_a_vllm_without_the_method_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(VllmConfig, WRAPPED)
    install()
    assert not hasattr(VllmConfig, WRAPPED)


EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
UNKNOWN = {"hf_config": BertConfig(), "model": "bert"}


class FooConfig(LlamaConfig):
    """Of a type without a record, that a plan reads from its layer types."""

    model_type = "foo"


def test_a_family_that_can_only_be_planned_is_refused() -> None:
    with pytest.raises(InputError, match="unknown model type 'foo': run vLLM without a store"):
        check(config(model_config={"hf_config": FooConfig(), "model": "foo"}))  # type: ignore[arg-type]


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(InputError, match="unknown model type 'bert'"):
        check(config(model_config=UNKNOWN))  # type: ignore[arg-type]


@pytest.mark.parametrize("transfer", [
    None,
    KVTransferConfig(),
    KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
    KVTransferConfig(kv_connector="ExampleConnector", kv_connector_module_path=EXAMPLE, kv_role="kv_both"),
], ids=["none", "no connector", "vLLM's", "another's"])  # fmt: skip
def test_other_configurations_are_left_alone(transfer: KVTransferConfig | None) -> None:
    given = config(model_config=UNKNOWN)
    given.kv_transfer_config = transfer
    check(given)  # type: ignore[arg-type]
