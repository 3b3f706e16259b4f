"""Settings of the connector, and what it refuses to run with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig

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
        "model_config": {"dtype": torch.bfloat16, "is_hybrid": True, "runner_type": "generate"},
        "load_config": {"load_format": "auto"},
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


@pytest.mark.parametrize(("parallel", "separate"), [
    ({"distributed_executor_backend": None}, False),
    ({"distributed_executor_backend": "uni"}, False),
    ({"distributed_executor_backend": "mp"}, True),
    ({"distributed_executor_backend": "ray", "world_size": 2}, True),
    ({"distributed_executor_backend": None, "world_size": 2}, True),
])  # fmt: skip
def test_processes(parallel: dict[str, Any], separate: bool) -> None:
    assert read(parallel_config=parallel).separate == separate


# What is refused.


@pytest.mark.parametrize(("changes", "names"), [
    ({"speculative_config": {"method": "eagle3"}}, "speculative decoding (eagle3)"),
    ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size 2"),
    ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size"),
    ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size"),
    ({"cache_config": {"cache_dtype": "fp8"}}, "a quantised KV cache (kv_cache_dtype 'fp8')"),
    ({"cache_config": {"cache_dtype": "float16"}}, "kv_cache_dtype 'float16'"),
    ({"cache_config": {"prefix_match_unit": 32}}, "prefix_match_unit 32"),
    ({"cache_config": {"kv_sharing_fast_prefill": True}}, "kv_sharing_fast_prefill"),
    ({"cache_config": {"mamba_cache_mode": "none"}}, "mamba_cache_mode 'none'; use 'align'"),
    ({"cache_config": {"mamba_cache_mode": "all"}}, "mamba_cache_mode 'all'; use 'align'"),
    ({"load_config": {"load_format": "dummy"}}, "load_format 'dummy'"),
    ({"model_config": {"runner_type": "pooling"}}, "runner 'pooling'"),
])  # fmt: skip
def test_features_of_vllm_that_are_refused(changes: dict[str, Any], names: str) -> None:
    message = refused(**changes)
    assert message.startswith("HybridKVConnector does not support ")
    assert names in message
    assert "leave it off" in message


def test_features_that_look_alike_are_not_refused() -> None:
    assert read(cache_config={"cache_dtype": "bfloat16"}) == read()
    assert read(cache_config={"mamba_cache_mode": "none"}, model_config={"is_hybrid": False}) == read()


@pytest.mark.parametrize("extra", [{}, {"store": None}, {"store": []}, {"store": ""}, {"store": [FILE, 3]},
                                   {"store": {"url": FILE}}, {"store": ["", FILE]}], ids=str)  # fmt: skip
def test_no_store(extra: dict[str, Any]) -> None:
    message = refused(extra)
    assert "kv_connector_extra_config: store is" in message
    assert "file:///path?size=200GiB" in message


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
