"""Stores on Valkey: conformance on one server and on a cluster, round trips, the index, the size limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridkv.store import Store, inspect_store, open_store
from hybridkv.store.urls import SCHEMES, parse_url
from hybridkv.store.valkey.blobs import ValkeyBlobs, ValkeyStore
from hybridkv.store.valkey.opening import open_address
from tests.store.conformance import StoreConformance
from tests.store.samples import load, name_of, rows_of, save
from tests.store.servers.valkey import ValkeyCluster, ValkeyServer


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as cluster:
        yield cluster


def opened(url: str, size: int = 16 << 20) -> ValkeyStore:
    return open_address(parse_url(url), size)


def blobs_of(store: ValkeyStore) -> ValkeyBlobs:
    assert isinstance(store.blobs, ValkeyBlobs)
    return store.blobs


@pytest.mark.parametrize("way", ["url", "unix_url"])
class TestValkeyStore(StoreConformance):
    @pytest.fixture
    def store(self, server: ValkeyServer, way: str) -> Iterator[Store]:
        server.ask("FLUSHALL")
        with opened(server.url if way == "url" else server.unix_url) as store:
            yield store


class TestValkeyCluster(StoreConformance):
    @pytest.fixture
    def store(self, cluster: ValkeyCluster) -> Iterator[Store]:
        cluster.flush()
        with opened(cluster.url) as store:
            yield store
