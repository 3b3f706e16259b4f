"""What a blob on a server asks for: nothing twice, and small rows together."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from hybridkv.errors import StoreFault
from hybridkv.store.buffers import Buffers, scatter
from hybridkv.store.remote_blob import RemoteBlob

KIB = 1 << 10
CONTENT = random.Random(1).randbytes(2 << 20)


class Served(RemoteBlob):
    """Keeps the ranges that were asked for."""

    def __init__(self, first: int = 64 * KIB, nbytes: int = len(CONTENT), end: int | None = None) -> None:
        """`end`: the server has no more than so many bytes."""
        super().__init__(nbytes, CONTENT[:first])
        self.asked: list[tuple[int, int]] = []
        self._end = nbytes if end is None else end

    def fetch(self, offset: int, buffers: Buffers, nbytes: int) -> int:
        assert sum(map(len, buffers)) == nbytes
        self.asked.append((offset, nbytes))
        return scatter(memoryview(CONTENT)[offset : min(offset + nbytes, self._end)], buffers)

    def read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        count = self.read_at(offset, [memoryview(data)[: nbytes // 3], memoryview(data)[nbytes // 3 :]], nbytes)
        return bytes(data[:count])


def test_what_came_with_the_opening_is_not_asked_for() -> None:
    blob = Served()
    assert blob.read(0, 64 * KIB) == CONTENT[: 64 * KIB]
    assert blob.read(10, 100) == CONTENT[10:110]
    assert blob.asked == []


def test_only_the_rest_of_a_large_row_is_asked_for() -> None:
    blob = Served()
    assert blob.read(4 * KIB, 1 << 20) == CONTENT[4 * KIB : (1 << 20) + 4 * KIB]
    assert blob.asked == [(64 * KIB, (1 << 20) - 60 * KIB)]


def test_small_rows_come_together() -> None:
    blob = Served()
    for offset in range(0, 2 << 20, 8 * KIB):
        assert blob.read(offset, 5000) == CONTENT[offset : offset + 5000]
    assert len(blob.asked) == 8
    assert all(nbytes <= 256 * KIB for _, nbytes in blob.asked)


def test_threads_that_read_small_rows_ask_once() -> None:
    blob = Served()
    with ThreadPoolExecutor(8) as threads:
        offsets = range(64 * KIB, 128 * KIB, 4 * KIB)
        assert list(threads.map(lambda one: blob.read(one, 4 * KIB), offsets)) == [
            CONTENT[one : one + 4 * KIB] for one in offsets
        ]
    assert len(blob.asked) <= 2


@pytest.mark.parametrize("nbytes", [100, 200 * KIB])
def test_reads_end_where_the_blob_ends(nbytes: int) -> None:
    blob = Served(nbytes=100 * KIB)
    assert blob.read(99 * KIB, nbytes) == CONTENT[99 * KIB : 99 * KIB + nbytes][:KIB]
    assert blob.read(100 * KIB, nbytes) == b""


def test_a_server_that_has_less_is_believed() -> None:
    blob = Served(end=70 * KIB)
    assert blob.read(69 * KIB, 4 * KIB) == CONTENT[69 * KIB : 70 * KIB]
    assert blob.read(60 * KIB, 1 << 20) == CONTENT[60 * KIB : 70 * KIB]


def test_random_reads_are_right() -> None:
    chance, blob = random.Random(2), Served(first=12_345)
    for _ in range(500):
        offset, nbytes = chance.randrange(len(CONTENT)), chance.choice((1, 700, 40_000, 300_000))
        assert blob.read(offset, nbytes) == CONTENT[offset : offset + nbytes]


def test_threads_that_wait_for_a_small_read_fail_with_it() -> None:
    blob, waiting = Served(), Event()

    def fetch(offset: int, buffers: Buffers, nbytes: int) -> int:
        blob.asked.append((offset, nbytes))
        waiting.wait(0.5)
        raise StoreFault("no answer")

    blob.fetch = fetch  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as threads:
        tries = [threads.submit(blob.read, 100 * KIB, 100) for _ in range(8)]
        assert all(isinstance(one.exception(), StoreFault) for one in tries)
    assert len(blob.asked) == 1
    del blob.fetch
    assert blob.read(100 * KIB, 100) == CONTENT[100 * KIB : 100 * KIB + 100]
