"""Opening a bucket by its URL. Credentials come from the environment and the provider's files, never from a URL."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from hybridkv.errors import StoreInputError
from hybridkv.store.address import Address, shown
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.bucket.aws_files import aws_settings

try:
    from obstore.store import AzureStore, GCSStore, S3Store

    from hybridkv.store.bucket.blobs import BucketBlobs
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "obstore":
        raise
    IS_INSTALLED = False
else:
    IS_INSTALLED = True

_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 3.0
_IDLE_S = 20
"""Servers close idle connections. Ours are closed earlier, so that few requests meet a dead one."""
_BUCKET = re.compile(r"[a-z0-9A-Z][a-zA-Z0-9._-]{1,254}")
_SEGMENT = re.compile(r"[A-Za-z0-9_.=+@,()!'-]+")


def open_address(address: Address, size: int) -> BlobStore:
    """Open a store. No request is made: a bucket that cannot be reached is a fault of the first call."""
    if not IS_INSTALLED:
        raise StoreInputError(f"{address.url!r} needs the package obstore: pip install 'hybridkv[bucket]'")
    if size < 1:
        raise StoreInputError(f"{address.url!r}: a size of {size} bytes; give it one such as 200GiB, or none")
    if address.user or not _BUCKET.fullmatch(address.host):
        raise StoreInputError(f"{address.url!r} has no valid name of a bucket: write it as {address.example}")
    prefix = address.path.strip("/")
    for segment in prefix.split("/") if prefix else ():
        if not _SEGMENT.fullmatch(segment) or segment in (".", ".."):
            raise StoreInputError(
                f"{address.url!r}: {segment!r} cannot be part of a prefix; use letters, digits and _.=+@,()!'-"
            )
    timeout = address.seconds("timeout", _TIMEOUT_S)
    return BlobStore(BucketBlobs(_connector(address), address.label, prefix, size, timeout))


def _connector(address: Address) -> Callable[[float], Any]:
    endpoint = _endpoint(address)
    options: dict[str, Any] = {} if endpoint is None else {"endpoint": endpoint}
    if address.scheme == "s3":
        options |= aws_settings(address.options.get("region"))

    def connect(timeout: float) -> Any:
        client = {
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT_S, timeout)),
            "timeout": timedelta(seconds=timeout),
            "pool_idle_timeout": timedelta(seconds=_IDLE_S),
        }
        # One more try: the connection may have been closed by the server while it was idle.
        backoff = {"init_backoff": timedelta(milliseconds=20), "max_backoff": timedelta(milliseconds=200), "base": 2}
        retry = {"max_retries": 1, "retry_timeout": timedelta(seconds=timeout / 2), "backoff": backoff}
        make = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[address.scheme]
        return make(address.host, client_options=client, retry_config=retry, **options)

    return connect


def _endpoint(address: Address) -> str | None:
    text = address.options.get("endpoint")
    if text is None:
        return None
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
    except ValueError:
        is_right = False
    if not is_right or "@" in text:
        raise StoreInputError(
            f"{address.url!r}: endpoint={shown(text)} is no address of a server; write it as https://host:9000"
        )
    return text.rstrip("/")
