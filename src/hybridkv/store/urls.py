"""Store URLs: `memory://?size=4GiB`, `file:///path?size=200GiB`. Several URLs are tiers, the fastest first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from hybridkv.errors import StoreInputError
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.file.blobs import FileStore
from hybridkv.store.file.io import Direct
from hybridkv.store.guard import Guarded
from hybridkv.store.memory import MemoryStore
from hybridkv.store.store import Store
from hybridkv.store.tiers.store import Tier, TieredStore, WritePolicy
from hybridkv.units import parse_size

Choice = TypeVar("Choice", bound=Enum)
_NO_LIMIT = 2**60 - 1


class Address(NamedTuple):
    """A parsed URL. All its options are known to the scheme."""

    url: str
    scheme: str
    path: str
    options: dict[str, str]

    def size(self) -> int:
        if "size" not in self.options:
            raise StoreInputError(f"{self.url!r} has no size: add size=, as in {SCHEMES[self.scheme].example}")
        return parse_size(self.options["size"])

    def choose(self, option: str, choices: type[Choice], default: Choice) -> Choice:
        text = self.options.get(option, default.value)
        try:
            return choices(text)
        except ValueError:
            known = ", ".join(choice.value for choice in choices)
            raise StoreInputError(f"{self.url!r}: {option}={text} is none of {known}") from None


class Scheme(NamedTuple):
    open: Callable[[Address], BlobStore]
    inspect: Callable[[Address], BlobStore] | None
    """None: such a store cannot be inspected from another process."""
    options: tuple[str, ...]
    example: str


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
    places = [os.path.realpath(address.path) for address in addresses if address.path]
    if len(set(places)) < len(places):
        raise StoreInputError(f"{' '.join(urls)}: a directory twice; tiers are different places, name it once")
    writes = [address.choose("write", WritePolicy, WritePolicy.THROUGH) for address in addresses]
    if writes[-1] is WritePolicy.BACK:
        raise StoreInputError(f"{urls[-1]!r}: write=back needs a tier below, and this is the last")
    opened: list[Store] = []
    try:
        for address in addresses:
            opened.append(Guarded(SCHEMES[address.scheme].open(address), _label(address)))
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
    inspect = SCHEMES[address.scheme].inspect
    if inspect is None:
        raise StoreInputError(f"{url!r}: such a store lives inside one process; name one that outlives it")
    store = inspect(address)
    store.keeps_corrupt = True
    return store


def parse_url(url: str) -> Address:
    """Parse a URL. Raises StoreInputError, which lists the valid forms, for unknown schemes and options."""
    try:
        if not url.isprintable():  # `urlsplit` silently drops some of these
            raise ValueError("letters that cannot be printed are written as %0A")
        parts = urlsplit(url)
        path = unquote(parts.path)
        if "\0" in path:
            raise ValueError("no path has a zero byte")
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise StoreInputError(f"{url!r} is no URL of a store ({error}): write it as {_examples()}") from None
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None or "://" not in url:
        raise StoreInputError(f"{url!r}: no store of that kind; write it as {_examples()}")
    options = dict(pairs)
    unknown = [option for option in options if option not in scheme.options]
    if unknown or len(options) != len(pairs) or parts.fragment:
        trouble = f"no option {unknown[0]!r}" if unknown else "an option twice, or a fragment"
        raise StoreInputError(f"{url!r}: {trouble}; {parts.scheme} stores have {', '.join(scheme.options)}")
    if parts.netloc:
        raise StoreInputError(f"{url!r}: {parts.netloc!r} is no path; write it as {scheme.example}")
    return Address(url, parts.scheme, path, options)


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
    return FileStore(path, _NO_LIMIT, address.choose("direct", Direct, Direct.AUTO), collect=False)


def _directory(address: Address) -> Path:
    if not os.path.normpath(f"/{address.path}").strip("/"):
        raise StoreInputError(f"{address.url!r} names no directory: write it as {SCHEMES['file'].example}")
    return Path(address.path)


def _label(address: Address) -> str:
    return f"{address.scheme}://{address.path}"


def _examples() -> str:
    return " or ".join(scheme.example for scheme in SCHEMES.values())


SCHEMES: dict[str, Scheme] = {
    "memory": Scheme(_open_memory, None, ("size", "write"), "memory://?size=4GiB"),
    "file": Scheme(_open_file, _inspect_file, ("size", "direct", "sync", "write"), "file:///path?size=200GiB"),
}
