"""Settings of the connector, and what it refuses to run with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from hybridkv.errors import InputError
from hybridkv.integrations.vllm.refusals import refuse_unsupported
from hybridkv.integrations.vllm.stores import seen_by_all
from hybridkv.store.urls import parse_url
from hybridkv.stream import LOAD_TIMEOUT_S
from hybridkv.stream.finder import LOOKUP_TIMEOUT_S
from hybridkv.units import parse_size

_STAGING = "2GiB"


@dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`, checked."""

    store: tuple[str, ...]
    staging_bytes: int
    """Bound on bytes in host memory that wait to be copied into blocks."""
    waiting_bytes: int
    """Bound on bytes in host memory that wait to be written."""
    layerwise: bool
    """Copy layer by layer, in the hooks of attention layers. On GPUs this needs piecewise CUDA graphs."""
    lookup_timeout_s: float
    load_timeout_s: float
    loads: bool
    saves: bool
    separate: bool
    """Whether scheduler and workers are different processes."""


def read_settings(config: VllmConfig, beside: Sequence[str] = ()) -> Settings:
    """Raises InputError for settings, and for features of vLLM, that the connector does not support.

    `beside`: as in `refuse_unsupported`.
    """
    refuse_unsupported(config, beside)
    transfer = config.kv_transfer_config
    given = dict(transfer.kv_connector_extra_config)
    store = given.pop("store", None)
    store = [store] if isinstance(store, str) else store
    if not isinstance(store, list) or not store or not all(url and isinstance(url, str) for url in store):
        raise InputError(
            f"kv_connector_extra_config: store is {store!r}; name one or more, the fastest first: "
            '{"store": ["memory://?size=4GiB", "file:///path?size=200GiB"]}'
        )
    for url in store:
        parse_url(url)
    if separate := _is_separate(config):
        seen_by_all(store)
    settings = Settings(
        store=tuple(store),
        staging_bytes=_size(given, "staging", _STAGING),
        waiting_bytes=_size(given, "waiting", "256MiB"),
        layerwise=_flag(given, "layerwise", True),
        lookup_timeout_s=_seconds(given, "lookup_timeout_s", LOOKUP_TIMEOUT_S),
        load_timeout_s=_seconds(given, "load_timeout_s", LOAD_TIMEOUT_S),
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
        separate=separate,
    )
    if (grid := given.pop("checkpoint_tokens", 0)) and (not isinstance(grid, int) or grid < 0 or grid % 16):
        raise _wrong("checkpoint_tokens", grid, "a multiple of 16, or 0")
    if given:
        known = "store, staging, waiting, layerwise, checkpoint_tokens, lookup_timeout_s, load_timeout_s"
        raise InputError(f"kv_connector_extra_config: no setting {next(iter(given))!r}; there are {known}")
    return settings


def _is_separate(config: VllmConfig) -> bool:
    """Every executor but vLLM's two of one process has workers in processes of their own."""
    return not issubclass(Executor.get_class(config), UniProcExecutor)


def _size(given: dict[str, Any], name: str, default: str) -> int:
    value = given.pop(name, default)
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except InputError:
        size = None
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise _wrong(name, value, "a size such as '2GiB'")
    return size


def _seconds(given: dict[str, Any], name: str, default: float) -> float:
    value = given.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
        raise _wrong(name, value, "seconds")
    return float(value)


def _flag(given: dict[str, Any], name: str, default: bool) -> bool:
    value = given.pop(name, default)
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _wrong(name: str, value: object, expected: str) -> InputError:
    return InputError(f"kv_connector_extra_config: {name} is {value!r}; expected {expected}")
