"""Stores in object storage: conformance, requests and round trips, uses, eviction."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from hybridkv.store import Store
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.bucket.blobs import NO_LIMIT, BucketBlobs
from hybridkv.store.bucket.opening import open_address
from hybridkv.store.urls import parse_url
from tests.store.conformance import StoreConformance
from tests.store.servers.s3 import CREDENTIALS, S3Server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in CREDENTIALS.items():
        monkeypatch.setenv(variable, value)


def opened(url: str, size: int = NO_LIMIT) -> BlobStore:
    return open_address(parse_url(url), size)


def blobs_of(store: BlobStore) -> BucketBlobs:
    assert isinstance(store.blobs, BucketBlobs)
    return store.blobs


@pytest.fixture
def url(s3: S3Server) -> str:
    """The URL of an empty store."""
    return s3.url(f"tests/{secrets.token_hex(8)}")


@pytest.mark.parametrize("size", [16 << 20, NO_LIMIT])
class TestS3Store(StoreConformance):
    @pytest.fixture
    def store(self, url: str, size: int) -> Iterator[Store]:
        with opened(url, size) as store:
            yield store
