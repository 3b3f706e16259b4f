"""Store URLs: `memory://?size=4GiB`, `file:///path?size=200GiB`, `valkey://host`, `s3://bucket`.

Several URLs are tiers, the fastest first.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from hybridkv.errors import StoreInputError
from hybridkv.store.address import Address, shown
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import NO_LIMIT
from hybridkv.store.file.blobs import FileStore
from hybridkv.store.file.io import Direct
from hybridkv.store.guard import Guarded
from hybridkv.store.memory import MemoryStore
from hybridkv.store.store import Store
from hybridkv.store.tiers.store import Tier, TieredStore, WritePolicy

_PASSWORDS = "put it into a file and add password_file=, or into an environment variable (docs/store.md)"


class Scheme(NamedTuple):
    open: Callable[[Address], BlobStore]
    inspect: Callable[[Address], BlobStore] | None
    """None: such a store cannot be inspected from another process."""
    options: tuple[str, ...]
    example: str
    has_host: bool = False
    refused: Mapping[str, str] = {}
    """Options of other stores that this one lacks, each with the reason."""


class _Sync(Enum):
    YES = "yes"
    NO = "no"


def open_store(urls: str | Sequence[str]) -> Store:
    """Open one store, or several as tiers. Each has a circuit breaker: a store that fails is skipped."""
    if isinstance(urls, str):
        urls = [urls]
    if not urls:
        raise StoreInputError(f"no store named: write one as {_examples()}")
    addresses = [parse_url(url) for url in urls]
    places = [address.place for address in addresses if address.place]
    if len(set(places)) < len(places):
        named = " ".join(address.url for address in addresses)
        raise StoreInputError(f"{named}: a place twice; tiers are different places, name it once")
    writes = [address.choose("write", WritePolicy, WritePolicy.THROUGH) for address in addresses]
    if writes[-1] is WritePolicy.BACK:
        raise StoreInputError(f"{addresses[-1].url!r}: write=back needs a tier below, and this is the last")
    opened: list[Store] = []
    try:
        for address in addresses:
            opened.append(Guarded(SCHEMES[address.scheme].open(address), address.label))
    except BaseException:
        for store in opened:
            store.close()
        raise
    if len(opened) == 1:
        return opened[0]
    return TieredStore([Tier(store, write) for store, write in zip(opened, writes, strict=True)])


def inspect_store(url: str) -> Store:
    """Open one store for tools. It must exist and needs no size; faults are raised, and corrupt objects are kept."""
    address = parse_url(url)
    address.size_or(None)  # it is not needed, but a wrong one is refused
    inspect = SCHEMES[address.scheme].inspect
    if inspect is None:
        raise StoreInputError(f"{address.url!r}: such a store lives inside one process; name one that outlives it")
    store = inspect(address)
    store.keeps_corrupt = True
    return store


def parse_url(url: str) -> Address:
    """Parse a URL. Raises StoreInputError, which lists the valid forms, for unknown schemes and options."""
    named = shown(url)
    try:
        if not url.isprintable():  # `urlsplit` silently drops some of these
            raise ValueError("letters that cannot be printed are written as %0A")
        parts = urlsplit(url)
        path, user, password, host = unquote(parts.path), unquote(parts.username or ""), parts.password, _host(parts)
        if "\0" in path:
            raise ValueError("no path has a zero byte")
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        reason = f" ({error})" if named == url else ""  # else it may quote the password
        raise StoreInputError(f"{named!r} is no URL of a store{reason}: write it as {_examples()}") from None
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None or "://" not in url:
        raise StoreInputError(f"{named!r}: no store of that kind; write it as {_examples()}")
    if password is not None or ":" in user:
        raise StoreInputError(f"{named!r} has a password, which others can read in a URL: {_PASSWORDS}")
    options = dict(pairs)
    unknown = [option for option in options if option not in scheme.options]
    if unknown or len(options) != len(pairs) or parts.fragment:
        if unknown and unknown[0] in scheme.refused:
            raise StoreInputError(f"{named!r}: no option {unknown[0]!r}: {scheme.refused[unknown[0]]}")
        trouble = f"no option {unknown[0]!r}" if unknown else "an option twice, or a fragment"
        raise StoreInputError(f"{named!r}: {trouble}; {parts.scheme} stores have {', '.join(scheme.options)}")
    if parts.netloc and not scheme.has_host:
        raise StoreInputError(f"{named!r}: {parts.netloc!r} is no path; write it as {scheme.example}")
    if scheme.has_host and not host:
        raise StoreInputError(f"{named!r} names no host: write it as {scheme.example}")
    return Address(named, parts.scheme, host, user, path, options, scheme.example)


def _host(parts: SplitResult) -> str:
    """Host and port. Raises ValueError if the port is no number."""
    host = parts.netloc.rpartition("@")[2]
    return host if parts.port is None or parts.hostname else ""


def _open_memory(address: Address) -> BlobStore:
    if address.path:
        raise StoreInputError(f"{address.url!r}: memory has no path; write it as {SCHEMES['memory'].example}")
    return MemoryStore(address.size())


def _open_file(address: Address) -> BlobStore:
    direct = address.choose("direct", Direct, Direct.AUTO)
    sync = address.choose("sync", _Sync, _Sync.NO) is _Sync.YES
    return FileStore(_directory(address), address.size(), direct, sync)


def _inspect_file(address: Address) -> BlobStore:
    path = _directory(address)
    if path.is_file():
        raise StoreInputError(f"{address.url!r}: {path} is a file, and a store is a directory; name that")
    if not FileStore.exists(path):
        raise StoreInputError(
            f"{address.url!r}: there is no store at {path}; name the directory that one was opened with"
        )
    return FileStore(path, NO_LIMIT, address.choose("direct", Direct, Direct.AUTO), collect=False)


def _directory(address: Address) -> Path:
    if not os.path.normpath(f"/{address.path}").strip("/"):
        raise StoreInputError(f"{address.url!r} names no directory: write it as {SCHEMES['file'].example}")
    return Path(address.path)


def _examples() -> str:
    names = ("memory", "file", "valkey", "s3")
    others = ", ".join(name for name in SCHEMES if name not in names)
    return f"{' or '.join(SCHEMES[name].example for name in names)}; other kinds are {others}"


def _remote(module: str, options: tuple[str, ...], example: str, *, has_host: bool = True) -> Scheme:
    """A store on a server. Its module is imported when such a store is opened, since it may need another package."""

    def open_it(address: Address) -> BlobStore:
        size = address.size_or(NO_LIMIT)
        assert size is not None
        return _backend(module).open_address(address, size)

    def inspect_it(address: Address) -> BlobStore:
        return _backend(module).open_address(address, NO_LIMIT)

    return Scheme(open_it, inspect_it, ("size", *options, "write"), example, has_host)


class _Backend(Protocol):
    def open_address(self, address: Address, size: int) -> BlobStore: ...


def _backend(module: str) -> _Backend:
    return cast(_Backend, importlib.import_module(module))


_VALKEY = "hybridkv.store.valkey.opening"
_VALKEY_OPTIONS = ("password_file", "timeout")
_BUCKET = "hybridkv.store.bucket.opening"
_MOONCAKE = "hybridkv.store.mooncake.opening"
_MOONCAKE_OPTIONS = ("admin", "metadata", "protocol", "device", "buffer", "timeout")
_EVICTS = "Mooncake evicts by itself"
_MOONCAKE_REFUSED = {
    "size": f"{_EVICTS}; its memory is --global_segment_size of each store process, and mooncake_master has "
    "--eviction_high_watermark_ratio and --eviction_ratio",
    "write": f"{_EVICTS} and does not tell what, so write=back would lose objects; every write goes through",
}

SCHEMES: dict[str, Scheme] = {
    "memory": Scheme(_open_memory, None, ("size", "write"), "memory://?size=4GiB"),
    "file": Scheme(_open_file, _inspect_file, ("size", "direct", "sync", "write"), "file:///path?size=200GiB"),
    "valkey": _remote(_VALKEY, _VALKEY_OPTIONS, "valkey://host:6379?size=200GiB"),
    "valkeys": _remote(_VALKEY, (*_VALKEY_OPTIONS, "ca_file"), "valkeys://host:6379?size=200GiB"),
    "valkey+unix": _remote(
        _VALKEY, (*_VALKEY_OPTIONS, "db"), "valkey+unix:///run/valkey.sock?size=200GiB", has_host=False
    ),
    "redis": _remote(_VALKEY, _VALKEY_OPTIONS, "redis://host:6379?size=200GiB"),
    "rediss": _remote(_VALKEY, (*_VALKEY_OPTIONS, "ca_file"), "rediss://host:6379?size=200GiB"),
    "redis+unix": _remote(
        _VALKEY, (*_VALKEY_OPTIONS, "db"), "redis+unix:///run/redis.sock?size=200GiB", has_host=False
    ),
    "s3": _remote(_BUCKET, ("endpoint", "region", "timeout"), "s3://bucket/prefix"),
    "gs": _remote(_BUCKET, ("endpoint", "timeout"), "gs://bucket/prefix"),
    "az": _remote(_BUCKET, ("endpoint", "timeout"), "az://container/prefix"),
    "mooncake": _remote(_MOONCAKE, _MOONCAKE_OPTIONS, "mooncake://master:50051")._replace(
        options=_MOONCAKE_OPTIONS, refused=_MOONCAKE_REFUSED
    ),
}
