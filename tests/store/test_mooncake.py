"""The Mooncake store against a real master: conformance, round trips, large objects, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hybridkv.cli.main import run
from hybridkv.store import Guarded, MissingObject, Reader, Store, StoreError, open_store
from hybridkv.store.mooncake.blobs import MooncakeBlobs, MooncakeStore
from hybridkv.store.urls import inspect_store, parse_url
from tests.store.conformance import StoreConformance
from tests.store.samples import NAMESPACE, OTHER_NAMESPACE, ROWS, load, name_of, read_row, rows_of, save
from tests.store.servers import mooncake
from tests.store.servers.mooncake import MooncakeServer

pytestmark = pytest.mark.skipif(mooncake.why_not() is not None, reason=str(mooncake.why_not()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    mooncake.make_importable()
    with MooncakeServer(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server: MooncakeServer) -> Iterator[Any]:
    """Mooncake's own client."""
    client = server.client()
    yield client
    client.close()


@pytest.fixture(scope="module")
def opened(server: MooncakeServer) -> Iterator[MooncakeBlobs]:
    """Closing a client takes a second: tests share one."""
    with inspect_store(server.url) as store:
        assert isinstance(store, MooncakeStore)
        assert isinstance(store.blobs, MooncakeBlobs)
        yield store.blobs


@pytest.fixture
def store(opened: MooncakeBlobs, plain: Any) -> MooncakeStore:
    """Empty, and with counters of its own."""
    plain.remove_all(True)
    plain.batch_remove([f"hybridkv-v1/about/{namespace}" for namespace in (NAMESPACE, OTHER_NAMESPACE)], True)
    return MooncakeStore(opened.renewed())


class TestMooncakeStore(StoreConformance):
    def test_touching_makes_objects_younger(self, store: Store) -> None:
        """Mooncake does not tell when an object was used: `used_at` is the time of the listing.

        A touch renews the object's lease, which decides what is evicted: `test_shrinking_evicts_the_oldest`.
        """
        save(store, name_of(1))
        store.touch([name_of(1), name_of(99)])
        assert [stored.name for stored in store.objects()] == [name_of(1)]

    def test_closing_twice_is_harmless(self, store: Store, server: MooncakeServer) -> None:
        other = inspect_store(server.url)
        save(other, name_of(1))
        other.close()
        other.close()
        with pytest.raises(StoreError, match="closed"):
            other.lookup([name_of(1)])
        assert load(store, name_of(1)) == rows_of(name_of(1))
