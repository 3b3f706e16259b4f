"""Our tier in vLLM's own offloading: real managers on host memory, real stores."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from tiers import CHUNK_BYTES, NO_REQUESTS, Offloading, bytes_of, config, key_of, keys_of, objects
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import Locality, LookupResult, OffloadingCounterMetadata, ReqContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hybridkv.errors import HybridKVError, StoreInputError
from hybridkv.integrations.vllm.tier import HybridKVTier, jobs, manager
from hybridkv.store import FileStore, Guarded, inspect_store
from tests.store.faulty import Fault, FaultyStore, Kind

MODULE = "hybridkv.integrations.vllm.tier"
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


# From host memory to the store and back.


def test_a_chunk_comes_back(store: Path) -> None:
    with Offloading(store) as engine:
        keys = keys_of(range(4))
        assert engine.save(keys)
        engine.forget()
        request = engine.request()
        assert engine.manager.lookup(keys[0], request) is LookupResult.RETRY
        assert [engine.load(key, request) for key in keys] == [bytes_of(key) for key in keys]
        assert engine.find(key_of(9), request) is LookupResult.MISS
        assert engine.stats() == {"saved_bytes": 4 * CHUNK_BYTES, "hits": 4, "misses": 1, "read_bytes": 4 * CHUNK_BYTES}
        assert engine.stats() == {}


def test_host_memory_evicts_and_the_store_keeps(store: Path) -> None:
    with Offloading(store, num_chunks=4) as engine:
        for number in range(0, 40, 4):
            engine.until(lambda number=number: engine.save(keys_of(range(number, number + 4))))
            engine.settle()
        for key in keys_of(range(40)):
            assert engine.load(key) == bytes_of(key)
        assert engine.stats()["hits"] >= 36


def test_a_restart_and_other_stores(store: Path, tmp_path: Path) -> None:
    keys = keys_of(range(3))
    with Offloading(store) as engine:
        engine.save(keys)
        engine.settle()
    with Offloading(store) as engine:
        assert [engine.load(key) for key in keys] == [bytes_of(key) for key in keys]
    with Offloading(tmp_path / "other") as engine:
        assert [engine.load(key) for key in keys] == [None] * 3


def test_what_waits_at_shutdown_is_written(store: Path) -> None:
    with Offloading(store, {"write_threads": 1}, num_chunks=64) as engine:
        engine.save(keys_of(range(64)))
    assert len(objects(store)) == 64


def test_several_urls_are_tiers(store: Path) -> None:
    urls = ["memory://?size=1MiB", f"file://{store}?size=1GiB"]
    with Offloading(urls) as engine:
        engine.save(keys_of(range(3)))
        engine.forget()
        assert engine.load(key_of(1)) == bytes_of(key_of(1))
    with Offloading(urls) as engine:
        assert engine.load(key_of(2)) == bytes_of(key_of(2))


def test_groups_and_hashes_of_other_lengths_are_other_chunks(store: Path) -> None:
    keys = [key_of(1, 0), key_of(1, 1), key_of(1, digits=16), key_of(1, digits=16)[:-4] + b"\0\0\0\1"]
    with Offloading(store) as engine:
        engine.save(keys[:1])
        engine.forget()
        assert [engine.load(key) for key in keys] == [bytes_of(keys[0]), None, None, None]
        engine.save(keys)
        engine.forget()
        assert [engine.load(key) for key in keys] == [bytes_of(key) for key in keys]
    assert len(objects(store)) == 4


def test_a_job_of_chunks_that_are_stored_already(store: Path) -> None:
    with Offloading(store) as engine:
        engine.save(keys_of(range(4)))
        engine.forget()
        engine.stats()
        engine.save(keys_of(range(6)))
        engine.settle()
        assert engine.stats() == {"saved_bytes": 2 * CHUNK_BYTES}


def test_positions_and_descriptions(store: Path) -> None:
    with Offloading(store) as engine:
        request = engine.request()
        request.set_offload_key_position(key_of(1), 64)
        engine.save([key_of(1)], request)
        engine.save([key_of(2)])
        engine.settle()
    with inspect_store(f"file://{store}") as tool:
        stored = list(tool.objects(headers=True))
        assert sorted(one.position for one in stored) == [0, 64]
        assert {one.value for one in stored} == {32 / CHUNK_BYTES}
        [(namespace, about)] = tool.descriptions().items()
    assert {one.name.namespace for one in stored} == {namespace}
    assert about == {
        "model": "some/model",
        "type": f"chunks of vLLM {vllm.__version__}",
        "weights": "some/model weights 1",
        "dtype": "bfloat16",
        "groups": "chunks-0, chunks-1",
        "chunk": "2 blocks of each worker, 8,192 bytes",
        "workers": "tp 1, pp 1, pcp 1, dcp 1",
    }


def test_loaded_and_touched_chunks_are_marked_as_used(store: Path) -> None:
    with Offloading(store) as engine:
        engine.save(keys_of(range(3)))
        engine.forget()
        for path in objects(store):
            os.utime(path, (1e9, 1e9))
        engine.load(key_of(0))
        engine.manager.touch(keys_of([1]), engine.request())
        engine.until(lambda: sum(path.stat().st_mtime > 1e9 for path in objects(store)) == 2)


# Nothing that changes the bytes is shared.


@pytest.mark.parametrize("change", [
    {"name": "another/model"}, {"dtype": "float16"}, {"tokens_per_hash": 8}, {"blocks_per_chunk": 1},
    {"worker_kv_bytes_per_block": 3008}, {"kv_cache_layout": "LBHNC"}, {"canonical_layout": True},
    {"world_size": 2, "tp_size": 2, "worker_kv_bytes_per_block": 1500},
    {"world_size": 2, "pp_size": 2, "worker_kv_bytes_per_block": 1500},
    {"world_size": 2, "tp_size": 2, "worker_kv_bytes_per_block": 3000, "replicated_layout": True},
    {"pcp_size": 2}, {"dcp_size": 2},
], ids=str)  # fmt: skip
def test_other_models_and_layouts_share_nothing(store: Path, change: dict[str, Any]) -> None:
    with Offloading(store) as first, Offloading(store, **change) as second:
        first.save(keys_of(range(2)))
        first.settle()
        assert second.find(key_of(0), second.request()) is LookupResult.MISS
        assert first.load(key_of(0)) == bytes_of(key_of(0))


def test_other_groups_weights_versions_and_hashes_share_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finds(**options: Any) -> bool:
        with Offloading(store, **options) as engine:
            return engine.find(key_of(0), engine.request()) is LookupResult.HIT

    with Offloading(store) as engine:
        engine.save([key_of(0)])
    groups = config([]).groups
    assert finds()
    assert not finds(groups=groups[:1])
    assert not finds(fields={"identity": "weights 2"})
    with monkeypatch.context() as other:
        other.setattr(vllm, "__version__", "0.33.0")
        assert not finds()
    init_none_hash(sha256_cbor)
    assert not finds()
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    init_none_hash(sha256)
    assert not finds()
    monkeypatch.delenv("PYTHONHASHSEED")
    init_none_hash(sha256)
    assert finds()


def test_weights_are_told_apart_by_their_files(store: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights.bin").write_bytes(b"first")

    def offloading() -> Offloading:
        return Offloading(store, {"identity": None}, name=str(model))

    with offloading() as engine:
        engine.save([key_of(0)])
    with offloading() as engine:
        assert engine.load(key_of(0)) == bytes_of(key_of(0))
    (model / "weights.bin").write_bytes(b"other")
    with offloading() as engine:
        assert engine.load(key_of(0)) is None


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


def test_partial_failures_are_told_key_by_key(store: Path, faults: list[Fault]) -> None:
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


def test_lookups_of_a_step_are_one_call(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Offloading(store) as engine:
        asked: list[int] = []
        real = engine.tier._store.lookup
        monkeypatch.setattr(engine.tier._store, "lookup", lambda names: asked.append(len(names)) or real(names))
        first, second = engine.request(), engine.request()
        for key in keys_of(range(50)):
            assert engine.manager.lookup(key, first) is LookupResult.RETRY
            assert engine.manager.lookup(key, first) is LookupResult.RETRY
        for key in keys_of(range(20, 60)):
            assert engine.manager.lookup(key, second) is LookupResult.RETRY
        time.sleep(0.02)
        assert asked == []
        engine.step()
        assert [engine.find(key, request) for request in (first, second) for key in keys_of(range(20, 50))] == [
            LookupResult.MISS
        ] * 60
        engine.step()
        assert asked == [60]


def test_what_one_request_missed_is_found_by_the_next(store: Path) -> None:
    with Offloading(store) as engine, Offloading(store) as other:
        first = engine.request()
        assert engine.find(key_of(0), first) is LookupResult.MISS
        other.save([key_of(0)])
        other.settle()
        assert engine.find(key_of(0), first) is LookupResult.MISS
        assert engine.load(key_of(0)) == bytes_of(key_of(0))


def test_answers_end_with_their_requests(store: Path) -> None:
    with Offloading(store) as engine:
        engine.save(keys_of(range(3)))
        engine.forget()
        for key in keys_of(range(6)):
            engine.load(key)
        request = engine.request()
        engine.manager.lookup(key_of(77), request)
        engine.manager.on_request_finished(request)  # before it has an answer
        engine.step()
        lookups = engine.tier._lookups
        engine.until(lambda: not lookups._waiting)
        assert not lookups._answers
        assert not lookups._batches


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
        faults[0].release.set()
        assert engine.load(key_of(0), request) == bytes_of(key_of(0))


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


def test_a_store_without_room(tmp_path: Path) -> None:
    with Offloading(f"file://{tmp_path}/small?size=64KiB", num_chunks=16) as engine:
        for number in range(16):
            engine.save(keys_of([number]))
            engine.settle()
        engine.forget()
        loaded = {number: engine.load(key_of(number)) for number in range(16)}
    assert 1 <= sum(found is not None for found in loaded.values()) <= 8
    assert all(found in (None, bytes_of(key_of(number))) for number, found in loaded.items())


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
    engine.save(keys_of(range(4)))
    engine.manager.lookup(key_of(9), engine.request())
    engine.step()
    engine.close()
    assert region.mmap_obj is None or region.mmap_obj.closed
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
    with pytest.raises(HybridKVError, match="a copy still runs"):
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


# Settings and vLLM's interface.


def refused(**fields: Any) -> str:
    tier = {"type": "HybridKVTier", "module_path": MODULE, "identity": "1"} | fields
    spec = TieringOffloadingSpec(config([tier]))
    before = set(threading.enumerate())
    with pytest.raises(StoreInputError) as caught:
        spec.get_manager()
    assert set(threading.enumerate()) == before
    return str(caught.value)


@pytest.mark.parametrize(("fields", "message"), [
    ({}, "store is None; expected \"file:///path?size=200GiB\""),
    ({"store": []}, "store is []"),
    ({"store": [3]}, "store is [3]"),
    ({"store": "floppy:///a"}, "floppy:///a"),
    ({"store": "file:///tmp/x"}, "has no size"),
    ({"store": "memory://?size=1MiB", "stor": 1}, "no field 'stor'; there are store, identity"),
    ({"store": "memory://?size=1MiB", "identity": 3}, "identity is 3"),
    ({"store": "memory://?size=1MiB", "identity": None}, '"identity": "revision 1"'),
    ({"store": "memory://?size=1MiB", "read_threads": 0}, "read_threads is 0"),
    ({"store": "memory://?size=1MiB", "write_threads": True}, "write_threads is True"),
    ({"store": "memory://?size=1MiB", "waiting": "much"}, "waiting is 'much'"),
    ({"store": "memory://?size=1MiB", "lookup_timeout_s": -1}, "lookup_timeout_s is -1"),
    ({"store": "memory://?size=1MiB", "load_timeout_s": "1s"}, "load_timeout_s is '1s'"),
    ({"store": "memory://?size=1MiB", "locality": "here"}, "locality is 'here'; expected LOCAL or REMOTE"),
], ids=str)  # fmt: skip
def test_settings_that_are_refused(fields: dict[str, Any], message: str) -> None:
    assert message in refused(**fields)


def test_other_fields_of_vllm() -> None:
    fields = {"locality": "REMOTE", "backpressure": {"backpressure_cls": "EMABackpressureDetector"}}
    with Offloading("memory://?size=1MiB", fields) as engine:
        assert engine.tier.locality is Locality.REMOTE
        assert engine.tier.bp_detector is not None
        engine.save(keys_of(range(2)))
        engine.settle()


def test_metrics_are_defined() -> None:
    tier = {"type": "HybridKVTier", "module_path": MODULE, "store": "memory://?size=1MiB"}
    assert SecondaryTierFactory.get_tier_class(tier) is HybridKVTier
    defined = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [tier]})
    ours = {name: about for name, about in defined.items() if "hybridkv" in name}
    assert len(ours) == 7
    assert all(isinstance(about, OffloadingCounterMetadata) for about in ours.values())
    for name, about in ours.items():
        assert about.labelnames == (("tier", "reason") if name.endswith("_failures") else ("tier",))


def test_an_empty_job_and_an_idle_step() -> None:
    with Offloading("memory://?size=1MiB") as engine:
        engine.tier.on_schedule_end(NO_REQUESTS)
        engine.tier.submit_store(TransferJob(1, [], [], False, ReqContext("r")))  # type: ignore[arg-type]
        [result] = engine.tier.get_finished_jobs()
        assert result.success
        assert jobs.Job(1, [], True, 0.0, 0).is_done
