"""Our tier in vLLM's own offloading, on stores that fail, hang and return wrong bytes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers import CHUNK_BYTES, Offloading, bytes_of, key_of, keys_of, objects
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob

from hybridkv.errors import StoreFault
from hybridkv.integrations.vllm.tier import manager
from hybridkv.store import FileStore, Guarded
from tests.store.faulty import Fault, FaultyStore, Kind

ROUNDS = int(os.environ.get("HYBRIDKV_TIER_ROUNDS", "3"))


@pytest.fixture(autouse=True)
def _hashes() -> None:
    """As every engine does before its first request."""
    init_none_hash(sha256)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def faults(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fault]]:
    """Faults of the store of all tiers from now on, below checksums and circuit breaker."""
    faults: list[Fault] = []

    def opened(urls: list[str]) -> Guarded:
        faulty = FaultyStore(FileStore(store, 1 << 30))
        faulty._faulty._faults = faulty.faults = faults
        return Guarded(faulty, "faulty", clock=lambda: time.monotonic() * 1e6)  # its backoff is some microseconds

    monkeypatch.setattr(manager, "open_store", opened)
    yield faults
    for fault in faults:
        fault.release.set()


# Objects that are not what they were.


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "flipped":
        data[-100] ^= 1
    elif how == "header":
        data[40] ^= 1
    elif how == "cut":
        del data[-1:]
    elif how == "empty":
        data.clear()
    elif how == "version":
        data[8] ^= 64
    path.write_bytes(data)


@pytest.mark.parametrize(("how", "reason"), [
    ("flipped", "corrupt"), ("header", "corrupt"), ("cut", "corrupt"), ("empty", "corrupt"), ("gone", "missing"),
    ("version", "unknown"),
])  # fmt: skip
def test_a_damaged_object_costs_its_own_chunk_only(store: Path, how: str, reason: str) -> None:
    keys = keys_of(range(4))
    with Offloading(store) as engine:
        for key in keys:  # one file after the other, so that files are known by their order
            engine.save([key])
        engine.forget()
        bad = next(path for path in objects(store) if path.name == engine.tier._names.of(keys[2]).key)
        request = engine.request()
        for key in keys:
            assert engine.manager.lookup(key, request) is LookupResult.RETRY
        engine.step()
        engine.until(lambda: engine.tier.lookup(keys[2], request) is LookupResult.HIT)
        damage(bad, how)
        found = [engine.load(key, request) for key in keys]
        assert found == [None if key == keys[2] else bytes_of(key) for key in keys]
        assert engine.stats()[f"load_failures {reason}"] == 1
        assert engine.find(keys[2], request) is LookupResult.MISS  # no second try in the same request
        assert "load_failures missing" not in engine.stats()


def test_partial_failures_are_told_key_by_key(store: Path) -> None:
    keys = keys_of(range(5))
    with Offloading(store) as engine:
        engine.save(keys)
        engine.forget()
        damage(next(path for path in objects(store) if path.name == engine.tier._names.of(keys[3]).key), "flipped")
        engine.tier.submit_load(TransferJob(7, keys, [4, 3, 2, 1, 0], True, ReqContext("r")))  # type: ignore[arg-type]
        engine.tier.drain_jobs()
        [result] = engine.tier.get_finished_jobs()
        assert (result.job_id, result.success) == (7, False)
        assert set(result.successful_keys or ()) == set(keys) - {keys[3]}
        assert result.transfer_bytes == 4 * CHUNK_BYTES
        for number, chunk in zip([0, 1, 2, 4], [4, 3, 2, 0], strict=True):
            assert engine._read(chunk) == bytes_of(keys[number])


# Stores that fail or hang.


@pytest.mark.parametrize(("kind", "reason"), [
    (Kind.FAIL_OPEN, "fault"), (Kind.FAIL_READ, "fault"), (Kind.MISSING, "missing"), (Kind.FLIP_ROW, "corrupt"),
    (Kind.SHORT_ROW, "corrupt"), (Kind.FLIP_HEADER, "corrupt"),
])  # fmt: skip
def test_reads_that_fail(store: Path, faults: list[Fault], kind: Kind, reason: str) -> None:
    with Offloading(store) as engine:
        engine.save(keys_of(range(2)))
        engine.forget()
        faults.append(Fault(kind))
        assert engine.load(key_of(0)) is None
        assert engine.stats()[f"load_failures {reason}"] == 1
        faults.clear()
        assert engine.load(key_of(1)) == bytes_of(key_of(1))


@pytest.mark.parametrize("kind", [Kind.FAIL_CREATE, Kind.FAIL_WRITE, Kind.FAIL_COMMIT])
def test_writes_that_fail(store: Path, faults: list[Fault], kind: Kind) -> None:
    with Offloading(store) as engine:
        faults.append(Fault(kind, times=1))
        engine.save(keys_of([0]))
        engine.forget()
        assert engine.stats() == {f"save_failures {'refused' if kind is Kind.FAIL_CREATE else 'fault'}": 1}
        assert engine.load(key_of(0)) is None
        engine.save(keys_of([1]))
        engine.forget()
        assert engine.load(key_of(1)) == bytes_of(key_of(1))
    assert len(objects(store)) == 1


def test_a_failing_store_is_skipped(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real backoff of a second."""
    fault = Fault(Kind.LOST)
    opened: list[Guarded] = []

    def open_lost(urls: list[str]) -> Guarded:
        opened.append(Guarded(FaultyStore(FileStore(store, 1 << 30), [fault]), "lost", clock=lambda: 1.0))
        return opened[0]

    monkeypatch.setattr(manager, "open_store", open_lost)
    with Offloading(store, num_chunks=64) as engine:
        engine.save(keys_of(range(40)))
        engine.settle()
        assert [engine.load(key_of(number)) for number in range(100, 140)] == [None] * 40
        assert fault.struck < 10
        assert opened[0].stats.skipped > 60


def test_a_slow_store_does_not_block_the_scheduler(store: Path, faults: list[Fault]) -> None:
    with Offloading(store, {"read_threads": 1, "write_threads": 1}) as engine:
        engine.save(keys_of(range(4)))
        engine.forget()
        reading, writing = Fault(Kind.SLOW, times=1), Fault(Kind.SLOW_WRITE, times=1)
        faults += [reading, writing]
        begun = time.monotonic()
        engine.save(keys_of([4, 5]))
        request = engine.request()
        engine.until(lambda: engine.manager.lookup(key_of(0), request) is LookupResult.HIT_PENDING)
        engine.until(lambda: reading.reached.is_set() and writing.reached.is_set())
        for _ in range(100):
            assert engine.manager.lookup(key_of(0), request) is LookupResult.HIT_PENDING
            assert engine.manager.lookup(key_of(1), request) is not LookupResult.MISS
            engine.step()
        assert engine.manager.has_pending_work()
        assert engine.tier.has_pending_work()
        assert time.monotonic() - begun < 5
        reading.release.set()
        writing.release.set()
        assert engine.load(key_of(0), request) == bytes_of(key_of(0))
        engine.settle()
        assert not engine.tier.has_pending_work()
    assert len(objects(store)) == 6


def test_a_lookup_that_hangs(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Offloading(store, {"lookup_timeout_s": 0.05}) as engine:
        engine.save(keys_of(range(3)))
        engine.forget()
        engine.stats()
        released, real = threading.Event(), engine.tier._store.lookup
        monkeypatch.setattr(engine.tier._store, "lookup", lambda names: released.wait() and real(names))
        request = engine.request()
        assert engine.find(key_of(0), request) is LookupResult.MISS
        assert engine.manager.lookup(key_of(1), request) is LookupResult.MISS  # at once
        assert engine.stats() == {"lookup_failures slow": 1, "lookup_failures skipped": 1}
        released.set()
        engine.until(lambda: not engine.tier._lookups._is_blocked)
        assert engine.find(key_of(0), request) is LookupResult.MISS
        assert engine.load(key_of(0)) == bytes_of(key_of(0))


def test_a_lookup_that_raises(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Offloading(store) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(engine.tier._store, "lookup", lambda names: 1 / 0)
            assert engine.load(key_of(0)) is None
            assert engine.stats() == {"lookup_failures failed": 1}
        assert engine.load(key_of(0)) is None
        assert engine.stats() == {"misses": 1}


def test_a_copy_that_raises(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Offloading(store) as engine:
        engine.save([key_of(0)])
        engine.forget()
        monkeypatch.setattr(engine.tier._store, "open", lambda name: 1 / 0)
        assert engine.load(key_of(0)) is None
        assert engine.stats()["load_failures error"] == 1


def test_loads_behind_one_that_hangs(store: Path, faults: list[Fault]) -> None:
    with Offloading(store, {"read_threads": 1, "load_timeout_s": 0.05}) as engine:
        engine.save(keys_of(range(3)))
        engine.forget()
        faults.append(Fault(Kind.SLOW, times=1))
        request, other = engine.request(), engine.request()
        engine.until(lambda: engine.manager.lookup(key_of(0), request) is LookupResult.HIT_PENDING)
        engine.until(faults[0].reached.is_set)
        assert engine.load(key_of(1), other) is None  # given up, since it has not begun
        assert engine.manager.lookup(key_of(0), request) is LookupResult.HIT_PENDING
        assert engine.stats()["load_failures timeout"] == 1
        assert engine.manager.lookup(key_of(2), engine.request()) is LookupResult.MISS  # at once
        assert engine.stats()["lookup_failures skipped"] == 1
        faults[0].release.set()
        assert engine.load(key_of(0), request) == bytes_of(key_of(0))
        assert engine.load(key_of(2)) == bytes_of(key_of(2))


def test_a_job_of_any_size_is_a_few_calls(store: Path, faults: list[Fault]) -> None:
    """The scheduler does not compete for the GIL, chunk by chunk, with threads that it has just woken."""
    with Offloading(store, {"read_threads": 2}) as engine:
        keys = keys_of(range(8))
        engine.save(keys)
        engine.forget()
        faults.append(Fault(Kind.SLOW))
        engine.tier.submit_load(TransferJob(1, keys, range(8), True, ReqContext("r")))  # type: ignore[arg-type]
        assert engine.tier._jobs._readers._queue.qsize() <= 2
        faults[0].release.set()
        engine.tier.drain_jobs()
        [result] = engine.tier.get_finished_jobs()
        assert result.success


def test_jobs_beyond_the_bound_are_dropped(store: Path, faults: list[Fault]) -> None:
    with Offloading(store, {"waiting": 4 * CHUNK_BYTES, "write_threads": 1}, num_chunks=16) as engine:
        faults.append(Fault(Kind.SLOW_WRITE, times=1))
        engine.save(keys_of(range(3)))
        engine.save(keys_of(range(3, 6)))
        engine.save(keys_of(range(6, 7)))
        faults[0].release.set()
        engine.settle()
        assert engine.stats() == {"saved_bytes": 4 * CHUNK_BYTES, "save_failures dropped": 3}
        engine.save(keys_of(range(7, 14)))  # larger than the bound, but nothing waits
        engine.forget()
        assert engine.stats() == {"saved_bytes": 7 * CHUNK_BYTES}
        assert [engine.load(key_of(number)) is not None for number in range(7)] == [True] * 3 + [False] * 3 + [True]


# The end.


def test_drain_and_reset(store: Path, faults: list[Fault]) -> None:
    with Offloading(store) as engine:
        faults.append(Fault(Kind.SLOW_WRITE))
        engine.save(keys_of(range(4)))
        threading.Timer(0.1, faults[0].release.set).start()
        engine.manager.reset_cache()
        assert faults[0].release.is_set()
        assert not engine.manager.has_pending_work()
        assert engine.load(key_of(0)) == bytes_of(key_of(0))


def test_shutdown_ends_threads_and_frees_the_memory(store: Path) -> None:
    before = set(threading.enumerate())
    engine = Offloading(store)
    region = engine.manager.primary_tier._mmap_region
    assert isinstance(region, SharedOffloadRegion)
    memory = region.mmap_obj
    engine.save(keys_of(range(4)))
    engine.manager.lookup(key_of(9), engine.request())
    engine.step()
    engine.close()
    assert memory.closed
    assert not set(threading.enumerate()) - before
    engine.tier.shutdown()  # again: nothing happens


def test_shutdown_keeps_memory_that_a_copy_uses(
    store: Path, faults: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "_CLOSE_S", 0.2)
    engine = Offloading(store, {"write_threads": 1})
    faults.append(Fault(Kind.SLOW_WRITE, times=1))
    engine.save(keys_of(range(4)))
    assert faults[0].reached.wait(5)
    with pytest.raises(StoreFault, match="a copy still runs"):
        engine.close()
    assert engine._read(0) == bytes_of(key_of(0))
    faults[0].release.set()
    engine.tier._jobs.drain(5)
    assert [job.done for job in engine.tier._jobs.take_ended()] == [[key_of(0)]]  # what waited was given up
    engine.manager.primary_tier._mmap_region.cleanup()


# Random lives.


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_faults(store: Path, faults: list[Fault], seed: int) -> None:
    """Many requests on a small pool and a store with random faults: every byte that vLLM would use is right."""
    source = random.Random(seed)
    kinds = [kind for kind in Kind if kind not in (Kind.SLOW, Kind.SLOW_WRITE)]
    loaded = 0
    fields = {"read_threads": 3, "write_threads": 2, "waiting": 16 * CHUNK_BYTES}
    for _ in range(4):  # lives of the process
        with Offloading(store, fields, num_chunks=12) as engine:
            for _ in range(40):
                if source.random() < 0.3:
                    faults.clear()
                elif source.random() < 0.3:
                    faults.append(Fault(source.choice(kinds), times=source.randrange(1, 6)))
                if source.random() < 0.1 and objects(store):
                    damage(source.choice(objects(store)), source.choice(["flipped", "cut", "gone", "version"]))
                first = source.randrange(40)
                keys = [key_of(first + number, source.randrange(2)) for number in range(source.randrange(1, 8))]
                request = engine.request()
                for key in source.sample(keys, len(keys)):
                    engine.manager.lookup(key, request)
                for key in keys:
                    found = engine.load(key, request)
                    assert found in (None, bytes_of(key)), "wrong bytes"
                    loaded += found is not None
                    if source.random() < 0.1:
                        break
                else:
                    engine.save(keys, request)
                engine.manager.on_request_finished(request)
                if source.random() < 0.1:
                    engine.manager.reset_cache()
            faults.clear()
    assert loaded > 100
