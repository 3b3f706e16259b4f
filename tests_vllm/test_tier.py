"""Our tier in vLLM's own offloading: real managers on host memory, real stores."""

from __future__ import annotations

import inspect
import json
import os
import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import vllm
from tiers import CHUNK_BYTES, NO_REQUESTS, Offloading, bytes_of, config, key_of, keys_of, objects
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import Locality, LookupResult, OffloadingCounterMetadata, ReqContext
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hybridkv.errors import StoreInputError
from hybridkv.integrations.vllm import tier
from hybridkv.integrations.vllm.tier import HybridKVTier, jobs, naming
from hybridkv.store import inspect_store

PAGE = Path(__file__).parents[1] / "docs" / "vllm.md"
MODULE = "hybridkv.integrations.vllm.tier"


@pytest.fixture(autouse=True)
def _hashes() -> None:
    """As every engine does before its first request."""
    init_none_hash(sha256)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


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


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM does not tell a tier the revision: only if there is one, it is known."""
    first, second = tmp_path / "snapshots" / "a", tmp_path / "snapshots" / "b"
    for revision in (first, second):
        revision.mkdir(parents=True)
        (revision / "config.json").write_text("{}")
        (revision / "weights.bin").write_bytes(b"weights")
    monkeypatch.setattr(naming, "hub_directory", lambda model, revision: first)
    with pytest.raises(StoreInputError, match=r'some/model.*2 revisions.*"identity": "revision 1"'):
        naming.model_weights("some/model", None)
    (second / "config.json").unlink()
    (second / "weights.bin").unlink()
    second.rmdir()
    assert naming.model_weights("some/model", None) == naming.model_weights(str(first), None)
    assert naming.model_weights("some/model", "mine") == "some/model mine"


# Lookups.


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


def test_a_store_without_room(tmp_path: Path) -> None:
    with Offloading(f"file://{tmp_path}/small?size=64KiB", num_chunks=16) as engine:
        for number in range(16):
            engine.save(keys_of([number]))
            engine.settle()
        engine.forget()
        loaded = {number: engine.load(key_of(number)) for number in range(16)}
    assert 1 <= sum(found is not None for found in loaded.values()) <= 8
    assert all(found in (None, bytes_of(key_of(number))) for number, found in loaded.items())


# Settings and vLLM's interface.


def refused(**fields: Any) -> str:
    spec = TieringOffloadingSpec(config([{"type": "HybridKVTier", "module_path": MODULE, "identity": "1"} | fields]))
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


@pytest.mark.parametrize("text", [PAGE.read_text(encoding="utf-8"), tier.__doc__], ids=["docs/vllm.md", "docstring"])
def test_the_example(text: str, store: Path) -> None:
    found = [one for one in re.findall(r"--kv-transfer-config '(.*?)'\n", text, re.DOTALL) if "HybridKVTier" in one]
    [example] = [json.loads(one) for one in found]
    assert OffloadingSpecFactory.get_spec_cls(example["kv_connector_extra_config"]) is TieringOffloadingSpec
    [fields] = example["kv_connector_extra_config"]["secondary_tiers"]
    assert fields.pop("store") == "file:///var/cache/hybridkv?size=200GiB"
    with Offloading(store, fields) as engine:
        engine.save([key_of(0)])
        engine.forget()
        assert engine.load(key_of(0)) == bytes_of(key_of(0))


def test_metrics_are_defined() -> None:
    fields = {"type": "HybridKVTier", "module_path": MODULE, "store": "memory://?size=1MiB"}
    assert SecondaryTierFactory.get_tier_class(fields) is HybridKVTier
    defined = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [fields]})
    ours = {name: about for name, about in defined.items() if "hybridkv" in name}
    assert len(ours) == 7
    assert all(isinstance(about, OffloadingCounterMetadata) for about in ours.values())
    for name, about in ours.items():
        assert about.labelnames == (("tier", "reason") if name.endswith("_failures") else ("tier",))


def test_that_is_all_we_override() -> None:
    ours = {name for name in vars(HybridKVTier) if not name.startswith("_")}
    assert not HybridKVTier.__abstractmethods__
    for name in ours - {"medium", "cache_hit_source"}:
        theirs = inspect.signature(getattr(SecondaryTierManager, name)).parameters
        assert list(inspect.signature(getattr(HybridKVTier, name)).parameters) == list(theirs)


def test_an_empty_job_and_an_idle_step() -> None:
    with Offloading("memory://?size=1MiB") as engine:
        engine.tier.on_schedule_end(NO_REQUESTS)
        engine.tier.submit_store(TransferJob(1, [], [], False, ReqContext("r")))  # type: ignore[arg-type]
        [result] = engine.tier.get_finished_jobs()
        assert result.success
        assert jobs.Job(1, [], True, deque(), 0).is_done
