"""Settings of the connector, and what it refuses to run with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from vllm.config import KVTransferConfig
from vllm.v1.executor import UniProcExecutor

from hybridkv.errors import HybridKVError, InputError
from hybridkv.integrations.vllm.settings import Settings, read_settings
from hybridkv.integrations.vllm.stores import open_shared, release, seen_by_all

FILE = "file:///var/cache/hybridkv?size=200GiB"
MEMORY = "memory://?size=4GiB"


def config(
    extra: dict[str, Any] | None = None, role: str = "kv_both", /, **changes: dict[str, Any] | None
) -> SimpleNamespace:
    """As much of vLLM's configuration as the connector looks at, with its own transfer config."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "world_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "distributed_executor_backend": "uni",
        },
        "cache_config": {
            "cache_dtype": "auto",
            "mamba_cache_mode": "align",
            "prefix_match_unit": None,
            "kv_sharing_fast_prefill": False,
        },
        "model_config": {
            "dtype": torch.bfloat16,
            "is_hybrid": True,
            "is_attention_free": False,
            "attention_chunk_size": None,
            "runner_type": "generate",
            "model": "tiny",
            "hf_config": Gemma3TextConfig(num_hidden_layers=6),
        },
        "load_config": {"load_format": "auto"},
        "scheduler_config": {"disable_hybrid_kv_cache_manager": False},
    }
    made: dict[str, Any] = {
        name: SimpleNamespace(**{**part, **(changes.pop(name, None) or {})}) for name, part in parts.items()
    }
    made["speculative_config"] = (
        SimpleNamespace(**given) if (given := changes.pop("speculative_config", None)) else None
    )
    assert not changes
    made["kv_transfer_config"] = KVTransferConfig(
        kv_connector="HybridKVConnector",
        kv_connector_module_path="hybridkv.integrations.vllm",
        kv_role=role,
        kv_connector_extra_config={"store": FILE} if extra is None else extra,
    )
    return SimpleNamespace(**made)


def read(*args: Any, **changes: Any) -> Settings:
    return read_settings(config(*args, **changes))  # type: ignore[arg-type]


def refused(*args: Any, **changes: Any) -> str:
    with pytest.raises(InputError) as error:
        read(*args, **changes)
    return str(error.value)


# What is read.


def test_defaults() -> None:
    settings = read()
    assert settings.store == (FILE,)
    assert settings.staging_bytes == 2 << 30
    assert settings.waiting_bytes == 256 << 20
    assert settings.layerwise
    assert (settings.loads, settings.saves, settings.separate) == (True, True, False)
    assert settings.lookup_timeout_s > 0
    assert settings.load_timeout_s > 0


def test_all_settings() -> None:
    given = {
        "store": [MEMORY, FILE],
        "staging": "1GiB",
        "waiting": 1000,
        "layerwise": False,
        "checkpoint_tokens": 512,
        "lookup_timeout_s": 0.5,
        "load_timeout_s": 3,
    }
    settings = read(given)
    assert settings.store == (MEMORY, FILE)
    assert (settings.staging_bytes, settings.waiting_bytes) == (1 << 30, 1000)
    assert not settings.layerwise
    assert (settings.lookup_timeout_s, settings.load_timeout_s) == (0.5, 3.0)
    assert given["store"] == [MEMORY, FILE], "vLLM's own configuration is left as it is"
    assert len(given) == 7


@pytest.mark.parametrize(("role", "loads", "saves"), [
    ("kv_both", True, True), ("kv_producer", False, True), ("kv_consumer", True, False),
])  # fmt: skip
def test_roles(role: str, loads: bool, saves: bool) -> None:
    settings = read({"store": FILE}, role)
    assert (settings.loads, settings.saves) == (loads, saves)


class OneProcess(UniProcExecutor):
    """An executor that a user names by its class."""


@pytest.mark.parametrize(("parallel", "separate"), [
    ({"distributed_executor_backend": "uni"}, False),
    ({"distributed_executor_backend": OneProcess}, False),
    ({"distributed_executor_backend": "external_launcher"}, False),
    ({"distributed_executor_backend": "mp"}, True),
    ({"distributed_executor_backend": "mp", "world_size": 2}, True),
    ({"distributed_executor_backend": "vllm.v1.executor.multiproc_executor.MultiprocExecutor"}, True),
])  # fmt: skip
def test_processes(parallel: dict[str, Any], separate: bool) -> None:
    """vLLM has settled which executor it takes before it makes connectors: None is never left."""
    assert read(parallel_config=parallel).separate == separate


# What is refused.


@pytest.mark.parametrize(("changes", "names", "way_out"), [
    ({"speculative_config": {"method": "eagle3"}}, "speculative decoding (eagle3)", "leave out --speculative-config"),
    ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size 2", "--tensor-parallel-size"),
    ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size", "leave out --decode"),
    ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size", "leave out --decode"),
    ({"parallel_config": {"distributed_executor_backend": "external_launcher", "world_size": 2}},
     "'external_launcher'", "set --distributed-executor-backend mp"),
    ({"cache_config": {"cache_dtype": "fp8"}}, "KV cache (kv_cache_dtype 'fp8')", "set --kv-cache-dtype auto"),
    ({"cache_config": {"cache_dtype": "float16"}}, "kv_cache_dtype 'float16'", "set --kv-cache-dtype auto"),
    ({"cache_config": {"prefix_match_unit": 32}}, "prefix_match_unit 32", "leave out --prefix-match-unit"),
    ({"cache_config": {"kv_sharing_fast_prefill": True}}, "skips layers", "leave out --kv-sharing-fast-prefill"),
    ({"cache_config": {"mamba_cache_mode": "none"}}, "without prefix caching", "--enable-prefix-caching"),
    ({"cache_config": {"mamba_cache_mode": "none"}, "model_config": {"is_hybrid": False, "is_attention_free": True}},
     "without prefix caching", "--enable-prefix-caching"),
    ({"cache_config": {"mamba_cache_mode": "all"}}, "mamba_cache_mode 'all'", "set --mamba-cache-mode align"),
    ({"load_config": {"load_format": "dummy"}}, "load_format 'dummy'", "leave out --load-format"),
    ({"model_config": {"runner_type": "pooling"}}, "runner 'pooling'", "set --runner generate"),
])  # fmt: skip
def test_features_of_vllm_that_are_refused(changes: dict[str, Any], names: str, way_out: str) -> None:
    message = refused(**changes)
    assert message.startswith("HybridKVConnector does not support ")
    assert names in message
    assert way_out in message


WITHOUT_MANAGER = {"disable_hybrid_kv_cache_manager": True}


@pytest.mark.parametrize(("beside", "chunk", "way_out"), [
    ([], None, "leave out --disable-hybrid-kv-cache-manager"),
    (["Other", "Third"], None, "Other and Third beside it in MultiConnector"),
    ([], 8192, "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1"),
])  # fmt: skip
def test_windows_need_the_hybrid_manager(beside: list[str], chunk: int | None, way_out: str) -> None:
    given: Any = config(scheduler_config=WITHOUT_MANAGER, model_config={"attention_chunk_size": chunk})
    with pytest.raises(InputError, match="needs vLLM's hybrid KV cache manager for tiny") as error:
        read_settings(given, beside)
    assert way_out in str(error.value)


def test_models_of_one_kind_do_not_need_it() -> None:
    for model in (LlamaConfig(), Gemma3TextConfig(layer_types=["sliding_attention"] * 26)):
        assert read(scheduler_config=WITHOUT_MANAGER, model_config={"hf_config": model}) == read()


def test_features_that_look_alike_are_not_refused() -> None:
    assert read(cache_config={"cache_dtype": "bfloat16"}) == read()
    assert read(cache_config={"mamba_cache_mode": "none"}, model_config={"is_hybrid": False}) == read()


@pytest.mark.parametrize("extra", [{}, {"store": None}, {"store": []}, {"store": ""}, {"store": [FILE, 3]},
                                   {"store": {"url": FILE}}, {"store": ["", FILE]}], ids=str)  # fmt: skip
def test_no_store(extra: dict[str, Any]) -> None:
    message = refused(extra)
    assert "kv_connector_extra_config: store is" in message
    assert "file:///path?size=200GiB" in message


@pytest.mark.parametrize("url", ["s4://bucket", "file:///path?szie=4GiB", "valkey://"])
def test_wrong_urls(url: str) -> None:
    assert url in refused({"store": [FILE, url]})


def test_unknown_settings() -> None:
    message = refused({"store": FILE, "stagign": "1GiB"})
    assert "no setting 'stagign'" in message
    assert "staging" in message


@pytest.mark.parametrize(("name", "value"), [
    ("staging", 0), ("staging", -1), ("staging", 1.5), ("staging", True), ("staging", None), ("staging", []),
    ("staging", "a lot"), ("staging", ""), ("staging", "0"), ("waiting", 0), ("waiting", "0GiB"),
    ("waiting", "12 parsecs"),
    ("layerwise", "yes"), ("layerwise", 1), ("layerwise", None),
    ("lookup_timeout_s", 0), ("lookup_timeout_s", "1s"), ("load_timeout_s", -1), ("load_timeout_s", True),
    ("load_timeout_s", float("nan")), ("load_timeout_s", float("inf")),
    ("checkpoint_tokens", 17), ("checkpoint_tokens", -16), ("checkpoint_tokens", "512"), ("checkpoint_tokens", True),
])  # fmt: skip
def test_bad_values(name: str, value: Any) -> None:
    message = refused({"store": FILE, name: value})
    assert message.startswith(f"kv_connector_extra_config: {name}")
    assert (str(value) or repr(value)) in message


# Stores of separate processes.


def test_memory_alone_is_not_seen_by_all() -> None:
    with pytest.raises(HybridKVError, match=r"memory://\?size=4GiB.*add a tier that they share"):
        seen_by_all([MEMORY])
    assert seen_by_all([MEMORY, FILE]) == [FILE]
    assert seen_by_all([FILE]) == [FILE]
    separate = {"distributed_executor_backend": "mp"}
    assert "add a tier that they share" in refused({"store": MEMORY}, parallel_config=separate)
    assert read({"store": [MEMORY, FILE]}, parallel_config=separate).separate
    assert not read({"store": MEMORY}).separate


def test_halves_of_one_process_share_a_store() -> None:
    urls = ["memory://?size=1MiB"]
    first, second = open_shared(urls), open_shared(urls)
    assert first is second
    release(urls)
    assert open_shared(urls) is first
    release(urls)
    release(urls)
    assert open_shared(urls) is not first
    release(urls)
