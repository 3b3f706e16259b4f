"""Stores in buckets of test servers."""

from __future__ import annotations

import secrets

from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import NO_LIMIT
from hybridkv.store.bucket.blobs import BucketBlobs
from hybridkv.store.bucket.opening import open_address
from hybridkv.store.urls import parse_url


def new_prefix() -> str:
    """The prefix of an empty store."""
    return f"tests/{secrets.token_hex(8)}"


def opened(url: str, size: int = NO_LIMIT) -> BlobStore:
    return open_address(parse_url(url), size)


def blobs_of(store: BlobStore) -> BucketBlobs:
    assert isinstance(store.blobs, BucketBlobs)
    return store.blobs
