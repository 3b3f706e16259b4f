"""Engines on stores, as people start them: URLs, directories, several processes, and ends of all kinds."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridkv import Engine, Result, SamplingParams
from hybridkv.errors import HybridKVError
from hybridkv.store import inspect_store
from hybridkv.store.file.blobs import FileStore
from tests import warm
from tests.engine.drive import GREEDY
from tests.engine.zoo import fresh, prompt
from tests.patience import Stopwatch
from tests.store.faulty import Fault, Kind
from tests.stream.faults import SIZE, GarbageStore

FAMILIES = ["llama", "gemma3", "falcon_h1", "kimi_linear"]
BRIEF = replace(GREEDY, max_tokens=6)
LONG = prompt(300, 1)


def engine_of(family: str, seed: int = 0, **options: Any) -> Engine:
    return Engine(fresh(family, seed), **{"memory": "8MiB", "device": "cpu", **options})


def url(path: Path) -> str:
    return f"file://{path}?size=1GiB"


def ask(engine: Engine, tokens: list[int] | None = None, **options: Any) -> Result:
    return engine.generate(tokens or LONG, BRIEF, progress=False, **options)[0]


def namespaces(path: Path) -> set[str]:
    with inspect_store(f"file://{path}") as store:
        return {stored.name.namespace for stored in store.objects()}


def check_readable(path: Path) -> int:
    """Reads every byte of every object; how many there are."""
    with inspect_store(f"file://{path}") as store:
        count = 0
        for stored in store.objects():
            with store.open(stored.name) as reader:
                for number, row in enumerate(reader.header.rows):
                    reader.read(number, [memoryview(bytearray(row.nbytes))])
            count += 1
        assert store.stats.corrupt == 0
    return count


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What engines without stores say."""
    said = {}
    for family in FAMILIES:
        with engine_of(family) as engine:
            said[family] = ask(engine).token_ids
    return said


@pytest.mark.parametrize("stream", ["auto", "async", "layerwise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restarted_engine_says_the_same_with_less_work(
    family: str, stream: str, tmp_path: Path, alone: dict[str, list[int]]
) -> None:
    for expected in (0, 288):
        with engine_of(family, store=url(tmp_path), stream=stream) as engine:
            result = ask(engine)
            assert result.token_ids == alone[family]
            assert result.cached_tokens == expected
            engine.check_integrity()
    assert check_readable(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "32MiB"},
        {"block_size": 32},
        {"attn_pack_size": 1},
        {"kv_cache_dtype": "bfloat16"},
        {"state_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"seed": 1},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_restart_with_other_options_finds_its_objects_or_none(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with engine_of(family, store=url(tmp_path)) as engine:
        ask(engine)
        before = engine._streaming.streamer.catalogue.namespace if engine._streaming else ""
    weights = options.get("seed", 0)
    options = {name: value for name, value in options.items() if name != "seed"}
    with engine_of(family, weights, **options) as engine:
        expected = ask(engine).token_ids
    with engine_of(family, weights, store=url(tmp_path), **options) as engine:
        result = ask(engine)
        assert engine._streaming is not None
        assert not engine._streaming.streamer.stats.failures
        is_same = engine._streaming.streamer.catalogue.namespace == before
    plans = {"memory", "row_layers", "attn_pack_size", "row_order"}
    assert is_same == (not plans.isdisjoint(options) or (family == "llama" and "state_dtype" in options))
    assert result.cached_tokens == (288 if is_same else 0)
    assert result.token_ids == expected
    assert len(namespaces(tmp_path)) == (1 if is_same else 2)


def test_equal_weights_are_one_model_wherever_they_were_loaded_from(tmp_path: Path) -> None:
    """Directories are known by their files, as in vLLM; a model in memory by its tensors, so the two do not meet."""
    model = fresh("falcon_h1")
    found = []
    for name in ("here", "there"):
        model.save_pretrained(tmp_path / name)
        with Engine(tmp_path / name, memory="8MiB", device="cpu", store=url(tmp_path / "store")) as engine:
            found.append(ask(engine).cached_tokens)
    with Engine(model, memory="8MiB", device="cpu", store=url(tmp_path / "store")) as engine:
        found.append(ask(engine).cached_tokens)
    with Engine(model, memory="8MiB", device="cpu", store=url(tmp_path / "store")) as engine:
        found.append(ask(engine).cached_tokens)
    assert found == [0, 288, 0, 288]
    assert len(namespaces(tmp_path / "store")) == 2


def test_a_store_knows_what_people_call_the_model(tmp_path: Path) -> None:
    """The name of the directory, of a hub's model whose snapshot it is, or of the class; never part of a key."""
    model = fresh("llama")
    snapshot = tmp_path / "models--Some--Llama-1B" / "snapshots" / "0123abcd"
    for path in (tmp_path / "my-llama", snapshot):
        model.save_pretrained(path)
    names = []
    for source in (tmp_path / "my-llama", f"{tmp_path}/my-llama/.", snapshot, model):
        directory = tmp_path / ("store of a model in memory" if source is model else "store")
        with Engine(source, memory="8MiB", device="cpu", store=url(directory)) as engine:
            ask(engine)
        with inspect_store(f"file://{directory}") as store:
            (about,) = store.descriptions().values()
        names.append(about["model"])
    assert names == ["my-llama", "my-llama", "Some/Llama-1B", "LlamaForCausalLM"]


def test_a_directory_that_is_deleted_under_an_engine_comes_back(
    tmp_path: Path, alone: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "hybridkv.store"), engine_of("llama", store=url(tmp_path / "store")) as engine:
        assert engine._streaming is not None
        assert ask(engine).token_ids == alone["llama"]
        engine.flush_store()
        shutil.rmtree(tmp_path / "store")
        ask(engine, prompt(300, 2))
        engine.flush_store()
        time.sleep(1.0)
        for seed in (3, 4):  # of the first, only one object may try
            ask(engine, prompt(300, seed))
            engine.flush_store()
        engine.check_integrity()
        assert ask(engine).token_ids == alone["llama"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    with inspect_store(f"file://{tmp_path}/store") as store:
        (about,) = store.descriptions().values()
    assert about["model"] == "LlamaForCausalLM"
    assert check_readable(tmp_path / "store")
    with engine_of("llama", store=url(tmp_path / "store")) as engine:
        assert ask(engine, prompt(300, 4)).cached_tokens == 288


def test_engines_that_come_and_go_leave_no_file_and_no_thread(tmp_path: Path) -> None:
    stores = ["memory://?size=300KiB&write=back", f"file://{tmp_path}?size=300KiB"]  # so small that both evict
    before, counts = set(threading.enumerate()), []
    for seed in range(4):
        with engine_of("falcon_h1", store=stores) as engine:
            ask(engine)
            ask(engine, prompt(300, seed))
            assert engine._streaming is not None
        assert not any(thread.name.startswith("hybridkv") for thread in set(threading.enumerate()) - before)
        counts.append(len(os.listdir("/proc/self/fd")))
        assert seed == 0 or engine._streaming.streamer.store.stats.evicted
    assert counts[1:] == [counts[1]] * 3


def test_one_changed_weight_is_another_model(tmp_path: Path) -> None:
    with Engine(fresh("llama"), memory="8MiB", device="cpu", store=url(tmp_path)) as engine:
        ask(engine)
    changed = fresh("llama")
    with torch.no_grad():
        next(changed.parameters())[0, 0] += 1e-3
    with Engine(changed, memory="8MiB", device="cpu", store=url(tmp_path)) as engine:
        assert ask(engine).cached_tokens == 0
    assert len(namespaces(tmp_path)) == 2


def test_salts_never_meet_in_a_store(tmp_path: Path) -> None:
    with engine_of("falcon_h1", store=url(tmp_path)) as engine:
        ask(engine, cache_salt="one")
    with engine_of("falcon_h1", store=url(tmp_path)) as engine:
        assert ask(engine, cache_salt="two").cached_tokens == 0
        assert ask(engine).cached_tokens == 0
        assert ask(engine, cache_salt="one").cached_tokens == 288


@pytest.mark.parametrize("options", [{"stream": "sometimes"}, {"load_timeout_s": 0}, {"store": "nfs://x"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(HybridKVError, match=r"stream|load_timeout_s|nfs"):
        engine_of("llama", **options)


def test_a_bad_store_is_known_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(HybridKVError, match="nfs"):
        Engine(tmp_path / "no such model", store="nfs://x")


def test_a_store_is_closed_if_there_is_no_engine_in_the_end(tmp_path: Path) -> None:
    class Closing(FileStore):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True
            super().close()

    store = Closing(tmp_path / "store", SIZE)
    with pytest.raises(HybridKVError, match="no such model"):
        Engine(tmp_path / "no such model", store=store)
    assert store.is_closed


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["async", "layerwise"])
def test_closing_while_requests_load_and_dump(stream: str, tmp_path: Path) -> None:
    with engine_of("falcon_h1", store=url(tmp_path)) as engine:
        ask(engine)
    store = GarbageStore(FileStore(tmp_path, SIZE), [Fault(Kind.SLOW)])
    engine = engine_of("falcon_h1", store=store, stream=stream)
    results: list[Any] = []

    def generate() -> None:
        prompts = [LONG + prompt(9, seed) for seed in range(4)] + [prompt(120, seed) for seed in range(4)]
        results.extend(engine.generate(prompts, replace(GREEDY, max_tokens=60), progress=False))

    thread = threading.Thread(target=generate)
    thread.start()
    assert store.faults[0].reached.wait(20)
    start = Stopwatch()
    engine.close()
    assert start.seconds < 20
    thread.join(10)
    assert not thread.is_alive()
    assert any(result.completions[0].finish_reason == "abort" for result in results)
    store.faults[0].release.set()
    assert check_readable(tmp_path)


def test_a_request_that_arrives_while_another_waits_for_its_rows_is_served(tmp_path: Path) -> None:
    """The engine's thread waits inside a step when the second request arrives."""
    with engine_of("falcon_h1", store=url(tmp_path)) as engine:
        said = ask(engine).token_ids
    store = GarbageStore(FileStore(tmp_path, SIZE), [Fault(Kind.SLOW)])
    with engine_of("falcon_h1", store=store, stream="layerwise") as engine:
        results: list[Result] = []
        thread = threading.Thread(target=lambda: results.append(ask(engine)))
        thread.start()
        assert store.faults[0].reached.wait(20)
        assert ask(engine, prompt(40, 3)).completions[0].error is None
        assert not results
        stream = engine.stats().stream
        assert stream is not None
        assert stream.late_loads == 1
        store.faults[0].release.set()
        thread.join(20)
        assert results[0].token_ids == said
        assert results[0].cached_tokens == 288
        engine.check_integrity()


@pytest.mark.parametrize("stream", ["async", "layerwise"])
def test_a_client_that_leaves_in_the_middle_of_a_load(stream: str, tmp_path: Path) -> None:
    with engine_of("falcon_h1", store=url(tmp_path)) as engine:
        said = ask(engine).token_ids
    store = GarbageStore(FileStore(tmp_path, SIZE), [Fault(Kind.SLOW)])
    with engine_of("falcon_h1", store=store, stream=stream) as engine:

        async def leave() -> None:
            updates: Any = engine.stream(LONG, BRIEF)
            waiting = asyncio.ensure_future(anext(updates))
            while not store.faults[0].reached.is_set():
                await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await updates.aclose()

        asyncio.run(leave())
        assert not any(engine.stats().memory.used_bytes.values())
        assert ask(engine, prompt(40, 3)).completions[0].error is None
        store.faults[0].release.set()
        store.faults.clear()
        assert ask(engine).token_ids == said
        engine.check_integrity()


@pytest.mark.parametrize("kind", [Kind.SLOW, Kind.FAIL_READ, Kind.FLIP_ROW], ids=lambda kind: kind.name)
@pytest.mark.parametrize("stream", ["async", "layerwise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_idle_engine_holds_no_page_after_a_bad_load_and_a_reset(
    family: str, stream: str, kind: Kind, tmp_path: Path
) -> None:
    with engine_of(family, store=url(tmp_path)) as engine:
        said = ask(engine).token_ids
    store = GarbageStore(FileStore(tmp_path, SIZE), [Fault(kind)])
    with engine_of(family, store=store, stream=stream, load_timeout_s=0.1) as engine:
        assert ask(engine).token_ids == said
        engine.reset_cache()
        assert not any(engine.stats().memory.used_bytes.values())
        store.faults[0].release.set()


def test_slow_reads_in_a_small_memory_fail_no_request_and_cut_no_reply(tmp_path: Path) -> None:
    """Reads take longer than their requests wait. Memory has room for one request, and all of them need it."""
    long = replace(GREEDY, max_tokens=230)
    prompts = [prompt(40, 1), prompt(40, 2), prompt(40, 3)]
    with engine_of("llama", store=url(tmp_path)) as engine:
        expected = [ask(engine, one).token_ids for one in prompts]
    store = GarbageStore(FileStore(tmp_path, SIZE), [Fault(Kind.SLOW)])
    with engine_of("llama", store=store, stream="async", load_timeout_s=0.3, memory="150KiB") as engine:
        assert engine.max_model_len == 273  # room for one whole request
        results = engine.generate(prompts, long, progress=False)
        assert [result.completions[0].error for result in results] == [None] * 3
        assert [len(result.token_ids) for result in results] == [230] * 3
        assert [result.token_ids[:6] for result in results] == expected
        assert engine.stats().stream.failures["timeout"]  # type: ignore[union-attr]
        store.faults[0].release.set()


def test_loads_leave_no_file_descriptors_open(tmp_path: Path) -> None:
    with engine_of("falcon_h1", store=url(tmp_path)) as engine:
        ask(engine)
    for kind in (None, Kind.FAIL_READ, Kind.SLOW):
        fault = None if kind is None else Fault(kind, row=0)
        store = GarbageStore(FileStore(tmp_path, SIZE), [] if fault is None else [fault])
        with engine_of("falcon_h1", store=store, stream="async", load_timeout_s=0.2) as engine:
            before = open_files(tmp_path)
            for _ in range(3):
                ask(engine)
                engine.reset_cache()
            if fault is not None:
                fault.release.set()
            deadline = time.monotonic() + 10
            while open_files(tmp_path) > before:
                time.sleep(0.01)
                assert time.monotonic() < deadline, "files of ended loads are open"


_FEW_FILES = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from hybridkv import Engine, SamplingParams
from tests.engine.zoo import prompt
model, store = sys.argv[1:3]
params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
for _ in range(2):
    with Engine(model, memory="8MiB", device="cpu", store=store, block_size=4, stream="async") as engine:
        engine._streaming.streamer.catalogue.stretch_blocks = 1
        (result,) = engine.generate(prompt(400, 1), params, progress=False)
        print(result.cached_tokens, dict(engine._streaming.streamer.stats.failures))
"""


def test_a_prompt_of_more_objects_than_files_may_be_open_by_default(saved: Path, tmp_path: Path) -> None:
    assert lines_of(start(_FEW_FILES, saved, url(tmp_path))) == ["0 {}", "396 {}"]


def open_files(path: Path) -> int:
    """Of objects: drafts come and go."""
    found = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(name.startswith(f"{path}/") and "objects" in name for name in found)


# --- processes --------------------------------------------------------------------------------------------------------

_RUN = """
import sys
from hybridkv import Engine, SamplingParams
from tests.engine.zoo import prompt
model, store, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
with Engine(model, memory="1MiB", device="cpu", store=store) as engine:
    print("ready", flush=True)
    for turn in range(6):
        prompts = [prompt(150, (first + turn + i) % 5)[: 150 - 7 * i] for i in range(3)]
        for result in engine.generate(prompts, params, progress=False):
            print(result.prompt_token_ids[:2], len(result.prompt_token_ids), result.token_ids, flush=True)
        engine.reset_cache()
    print("failures", dict(engine._streaming.streamer.stats.failures), flush=True)
"""


def start(code: str, *args: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, *map(str, args)]
    return warm.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    fresh("falcon_h1").save_pretrained(path)
    return path


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    try:
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    return out.splitlines()


def test_two_processes_on_one_store_say_the_same_as_one(saved: Path, tmp_path: Path) -> None:
    both = [start(_RUN, saved, url(tmp_path), first) for first in (0, 2)]
    said = [lines_of(process) for process in both]
    with Engine(saved, memory="1MiB", device="cpu") as engine:
        expected = set()
        for seed in range(5):
            for i in range(3):
                (result,) = engine.generate(
                    prompt(150, seed)[: 150 - 7 * i],
                    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
                    progress=False,
                )
                expected.add(f"{result.prompt_token_ids[:2]} {len(result.prompt_token_ids)} {result.token_ids}")
    for lines in said:
        assert set(lines[1:-1]) <= expected
        assert lines[-1] == "failures {}"
    assert check_readable(tmp_path)
    assert len(namespaces(tmp_path)) == 1


def test_a_process_that_is_killed_leaves_a_store_that_others_can_use(saved: Path, tmp_path: Path) -> None:
    for delay_s in (0.0, 0.1, 0.3):
        process = start(_RUN, saved, url(tmp_path), 0)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        process.kill()
        process.wait()
        process.stdout.close()
        check_readable(tmp_path)
    lines = lines_of(start(_RUN, saved, url(tmp_path), 0))
    assert lines[-1] == "failures {}"
    assert check_readable(tmp_path)


_HANG = """
import sys, threading
from hybridkv import Engine, SamplingParams
from hybridkv.store.file.blobs import FileStore
from tests.engine.zoo import prompt
from tests.store.faulty import Fault, Kind
from tests.stream.faults import GarbageStore
from pathlib import Path
model, path, how = sys.argv[1:4]
params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
with Engine(model, memory="1MiB", device="cpu", store=f"file://{path}?size=1GiB") as engine:
    engine.generate(prompt(150, 1), params, progress=False)
store = GarbageStore(FileStore(Path(path), 1 << 30), [Fault(Kind.SLOW)])
engine = Engine(model, memory="1MiB", device="cpu", store=store, load_timeout_s=0.1)
(result,) = engine.generate(prompt(150, 1), params, progress=False)
assert result.cached_tokens == 0
if how == "closed":
    engine.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["closed", "left open"])
def test_a_read_that_hangs_does_not_keep_the_process_from_ending(saved: Path, tmp_path: Path, how: str) -> None:
    assert lines_of(start(_HANG, saved, tmp_path, how)) == ["done"]
