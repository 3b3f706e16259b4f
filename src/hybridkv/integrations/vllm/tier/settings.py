"""Settings of the tier: the fields of its entry in `secondary_tiers`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from vllm.v1.kv_offload.base import Locality

from hybridkv.errors import InputError, StoreInputError
from hybridkv.units import parse_size

_MOST_THREADS = 256


@dataclass(frozen=True)
class TierSettings:
    store: tuple[str, ...]
    """URLs, the fastest first."""
    identity: str | None
    """What vLLM's tiers are not told and bytes depend on. None: a digest of the model's files."""
    read_threads: int
    write_threads: int
    waiting: int
    """Bound on bytes of chunks that wait to be written. vLLM cannot evict these chunks from host memory."""
    lookup_timeout_s: float
    load_timeout_s: float
    """Bound on the time that a load waits for a thread."""
    locality: Locality | None
    """For vLLM's filters of tiers."""


def read_settings(given: Mapping[str, Any]) -> TierSettings:
    """Raises StoreInputError for unknown fields and wrong values. Does not open the store."""
    known = [field.name for field in fields(TierSettings)]
    for name in given:
        if name not in known:
            raise StoreInputError(f"secondary_tiers, HybridKVTier: no field {name!r}; there are {', '.join(known)}")
    return TierSettings(
        store=_urls(given.get("store")),
        identity=_text(given, "identity"),
        read_threads=_count(given, "read_threads", 8),
        write_threads=_count(given, "write_threads", 4),
        waiting=_size(given, "waiting", "1GiB"),
        lookup_timeout_s=_seconds(given, "lookup_timeout_s", 2.0),
        load_timeout_s=_seconds(given, "load_timeout_s", 30.0),
        locality=_locality(given.get("locality")),
    )


def _urls(store: Any) -> tuple[str, ...]:
    urls = [store] if isinstance(store, str) else store
    if not isinstance(urls, list) or not urls or not all(url and isinstance(url, str) for url in urls):
        raise _wrong("store", store, '"file:///path?size=200GiB", or a list of URLs, the fastest first')
    return tuple(urls)


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise _wrong(name, value, "a text, such as a revision of the weights")


def _count(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_THREADS:
        raise _wrong(name, value, f"a number from 1 to {_MOST_THREADS}")
    return value


def _size(given: Mapping[str, Any], name: str, default: str) -> int:
    value = given.get(name, default)
    try:
        size = parse_size(value) if isinstance(value, str) else value
    except InputError:
        size = None
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise _wrong(name, value, "a size such as '1GiB'")
    return size


def _seconds(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
        raise _wrong(name, value, "seconds")
    return float(value)


def _locality(value: Any) -> Locality | None:
    choices = {locality.value: locality for locality in Locality}
    if value is not None and value not in choices:
        raise _wrong("locality", value, " or ".join(choices))
    return None if value is None else choices[value]


def _wrong(name: str, value: object, expected: str) -> StoreInputError:
    return StoreInputError(f"secondary_tiers, HybridKVTier: {name} is {value!r}; expected {expected}")
