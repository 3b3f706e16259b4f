"""The record of a request says where its prompt came from, and why not more of it was cached."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridkv import Engine, SamplingParams
from hybridkv.cache import Evicted, Explanation
from hybridkv.engine import Prompt, RequestRecord
from hybridkv.engine.inspection.record import StoreAccount
from hybridkv.engine.inspection.why import reasons
from hybridkv.errors import RequestError
from tests.engine.zoo import fresh, prompt

SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return fresh("qwen3_next")


@pytest.fixture
def engine(hybrid: Any) -> Iterator[Engine]:
    with Engine(hybrid, memory="4MiB", device="cpu") as started:
        yield started
        started.check_integrity()


def wait_for(event: threading.Event) -> None:
    assert event.wait(20)


def record_of(engine: Engine, ids: list[int] | Prompt, params: SamplingParams = SHORT) -> RequestRecord:
    record = engine.generate([ids], params, progress=False)[0].record
    assert record is not None
    spans = record.spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == record.prompt_tokens == sum(record.by_source.values())
    assert [moment.at for moment in record.moments] == sorted(moment.at for moment in record.moments)
    json.dumps(record.to_json())
    return record


def codes(record: RequestRecord) -> list[str]:
    return [reason.code for reason in record.why]


# --- where a prompt came from, and why not more -----------------------------------------------------------------------


def test_a_new_prompt_and_the_same_again(engine: Engine) -> None:
    ids = prompt(100, 1)
    first = record_of(engine, ids)
    assert first.by_source == {"memory": 0, "store": 0, "engine": 0, "computed": 100}
    assert codes(first) == ["never_seen"]
    again = record_of(engine, ids)
    assert again.by_source == {"memory": 96, "store": 0, "engine": 0, "computed": 4}
    assert codes(again) == []
    assert again.lookup is not None
    assert again.lookup.checkpoint is not None
    assert (again.lookup.checkpoint.position, again.lookup.missing) == (96, "below_block")
    assert [moment.what for moment in again.moments] == ["queued", "started", "computes", "first token", "finished"]


def test_a_prompt_that_leaves_another_in_its_middle(hybrid: Any) -> None:
    """Its keys and values are there and its state is not; the next one that leaves there finds it."""
    with Engine(hybrid, memory="1MiB", device="cpu") as engine:
        shared = prompt(90, 2)
        record_of(engine, shared + prompt(200, 3))
        for number in (4, 5):
            record = record_of(engine, shared + prompt(60, number))
            assert record.lookup is not None
            assert (record.lookup.matched_tokens, record.lookup.parted_at) == (80, 90)
            if number == 4:
                assert record.by_source["memory"] < 80
                assert codes(record) == ["state_missing", "new"]
                assert (record.why[0].position, record.why[0].tokens) == (80, 80 - record.by_source["memory"])
                [state] = [group for group in record.lookup.groups if group.role == "state"]
                [full] = [group for group in record.lookup.groups if group.role == "full"]
                assert (full.supplies, full.runs) == (80, ((0, 80),))
                assert state.supplies == record.by_source["memory"]
        assert record.by_source["memory"] == 80
        assert codes(record) == ["new"]
        assert record.why[0].position == 90


def test_a_breakpoint_where_prompts_part_makes_the_hit(engine: Engine) -> None:
    shared = prompt(96, 6)
    record_of(engine, Prompt(shared + prompt(100, 7), breakpoints=[96]))
    record = record_of(engine, shared + prompt(50, 8))
    assert record.by_source["memory"] == 96
    assert record.lookup is not None
    assert record.lookup.checkpoint is not None


def test_every_group_supplies_the_position_at_which_a_turn_resumes(hybrid: Any) -> None:
    """A reply may end inside a block: its checkpoint has the block's pages."""
    with Engine(hybrid, memory="2MiB", device="cpu") as engine:
        ids = prompt(100, 9)
        [first] = engine.generate([ids], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        record = record_of(engine, [*ids, *first.token_ids, 1, 2, 3])
        assert record.lookup is not None
        assert record.lookup.position % 16, "inside a block"
        assert all(group.supplies >= record.lookup.position for group in record.lookup.groups)


def test_a_salt_is_part_of_the_reason(hybrid: Any) -> None:
    with Engine(hybrid, memory="2MiB", device="cpu") as engine:
        ids = prompt(100, 9)
        record_of(engine, ids)
        [result] = engine.generate([ids], SamplingParams(max_tokens=2, temperature=0), cache_salt="tenant")
        assert result.record is not None
        assert "with the same cache_salt" in result.record.why[0].text


def test_what_was_evicted_is_told_with_its_time(hybrid: Any) -> None:
    with Engine(hybrid, memory="400KiB", device="cpu") as engine:
        ids = prompt(100, 9)
        record_of(engine, ids)
        for number in range(30):
            record_of(engine, prompt(100, 100 + number))
        record = record_of(engine, ids)
        assert record.by_source["memory"] < 96
        assert record.lookup is not None
        evicted = record.evicted or record.lookup.evicted
        assert evicted is not None
        assert evicted.position == 96, "the reply ended at 101, but the prompt could resume at 96 at most"
        assert 0 < evicted.requests_ago <= 31
        [reason, *_] = record.why
        assert reason.code in ("evicted", "state_evicted")
        assert reason.tokens <= 96
        assert re.search(r"evicted \d+ s ago \(\d+ requests? ago\)", reason.text)
        assert "or a store" in reason.text


def test_a_prompt_below_a_block_cannot_hit(engine: Engine) -> None:
    record = record_of(engine, prompt(16, 10))
    assert codes(record) == ["too_short"]
    assert "17" in record.why[0].text


def test_a_prompt_that_parts_in_its_first_block(engine: Engine) -> None:
    ids = prompt(60, 11)
    record_of(engine, ids)
    record = record_of(engine, [*ids[:7], *prompt(60, 12)])
    assert codes(record) == ["parted_early"]
    assert record.why[0].position == 7


def test_windows_are_explained_too() -> None:
    with Engine(fresh("gemma3"), memory="4MiB", device="cpu") as engine:
        shared = prompt(90, 13)
        record_of(engine, shared + prompt(200, 14))
        record = record_of(engine, shared + prompt(60, 15))
        assert record.lookup is not None
        assert record.lookup.matched_tokens == 80
        local = [group for group in record.lookup.groups if group.role == "local"]
        assert local
        assert min(group.supplies for group in record.lookup.groups) >= record.lookup.position


# --- stores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "layerwise"])
def test_what_a_store_has_supplied(hybrid: Any, tmp_path: Path, mode: str) -> None:
    with Engine(hybrid, memory="4MiB", device="cpu", store=f"file://{tmp_path}?size=64MiB", stream=mode) as engine:
        ids = prompt(300, 20)
        assert codes(record_of(engine, ids)) == ["never_seen", "store_has_no_more"]
        engine.flush_store()
        engine.reset_cache()
        record = record_of(engine, ids)
        assert record.by_source["store"] >= 256
        assert record.store is not None
        assert (record.store.outcome, record.store.mode, record.store.failure) == ("loaded", mode, None)
        assert record.store.num_bytes > 0
        transfer = record.to_json()["transfer"]
        assert sum(row["bytes"] for row in transfer["rows"]) == record.store.num_bytes
        assert {row["group"] for row in transfer["rows"]} == {"full", "state"}
        assert all(0 <= row["start"] <= row["end"] <= record.total_s for row in transfer["rows"])
        layers = [one["layer"] for one in transfer["layers"]]
        assert layers == (list(range(engine.plan.model.num_layers)) if mode == "layerwise" else [])


def test_a_load_in_the_only_step_of_a_request(hybrid: Any, tmp_path: Path) -> None:
    with Engine(
        hybrid, memory="4MiB", device="cpu", store=f"file://{tmp_path}?size=64MiB", stream="layerwise"
    ) as engine:
        ids = prompt(300, 22)
        record_of(engine, ids)
        engine.flush_store()
        engine.reset_cache()
        record = record_of(engine, ids, SamplingParams(max_tokens=1, temperature=0))
        assert record.by_source["store"] == record.cached_tokens >= 256
        assert record.store is not None
        assert record.store.outcome == "loaded"


def test_a_load_that_fails_is_a_reason(hybrid: Any, tmp_path: Path) -> None:
    with Engine(hybrid, memory="4MiB", device="cpu", store=f"file://{tmp_path}?size=64MiB", stream="async") as engine:
        ids = prompt(300, 21)
        record_of(engine, ids)
        engine.flush_store()
        engine.reset_cache()
        for path in tmp_path.rglob("*"):
            if path.is_file() and path.stat().st_size > 20_000:
                data = bytearray(path.read_bytes())
                data[-5000] ^= 255
                path.write_bytes(data)
        record = record_of(engine, ids)
        assert record.by_source["computed"] == 300
        assert "store_failed" in codes(record)
        assert record.store is not None
        assert record.store.failure == "corrupt"


# --- every end of a request -------------------------------------------------------------------------------------------


def test_every_request_leaves_a_record_however_it_ends(engine: Engine) -> None:
    seen: list[RequestRecord] = []
    engine.inspection.on_record(seen.append)

    async def leave_early() -> None:
        async for _ in engine.stream(
            prompt(40, 30), SamplingParams(max_tokens=400, ignore_eos=True), request_id="gone"
        ):
            break

    asyncio.run(leave_early())
    record_of(engine, prompt(40, 31), SamplingParams(max_tokens=3, n=3, temperature=1.0, ignore_eos=True, seed=1))
    assert [(record.request_id, record.finish_reason) for record in seen[:1]] == [("gone", "abort")]
    assert (seen[1].finish_reason, seen[1].reply_tokens) == ("length", 9)
    assert len(seen) == 2


def test_a_listener_that_raises_harms_no_request(engine: Engine) -> None:
    def refuse(record: RequestRecord) -> None:
        raise ValueError(record.request_id)

    engine.inspection.on_record(refuse)
    assert record_of(engine, prompt(40, 32)).finish_reason == "length"


def test_an_id_of_a_running_request_is_refused(engine: Engine) -> None:
    async def twice() -> None:
        first = engine.stream(prompt(40, 33), SamplingParams(max_tokens=300, ignore_eos=True), request_id="one")
        async for _ in first:
            second = engine.stream(prompt(40, 34), SHORT, request_id="one")
            with pytest.raises(RequestError, match="'one' is in use"):
                await anext(second)
            break
        await first.aclose()  # type: ignore[attr-defined]

    asyncio.run(twice())


@pytest.mark.parametrize("request_id", ["", "x" * 257, "\ud800", 7, 10**5000], ids=["", "long", "half", "7", "huge"])
def test_an_id_that_no_reply_can_have_is_refused(engine: Engine, request_id: Any) -> None:
    with pytest.raises(RequestError, match=r"request_id is .*: pass a text of 1 to 256 whole characters"):
        asyncio.run(anext(engine.stream(prompt(40, 33), SHORT, request_id=request_id)))  # type: ignore[arg-type]


def test_a_batch_with_an_id_in_use_is_refused_and_the_request_that_has_it_continues(engine: Engine) -> None:
    engine._numbers, gate = itertools.count(1000), threading.Event()
    engine._loop.post(lambda: wait_for(gate))  # nothing runs until both have been submitted

    async def beside() -> list[str | None]:
        return [
            update.finish_reason async for update in engine.stream(prompt(40, 35), SHORT, request_id="request-1001")
        ]

    async def both() -> list[str | None]:
        running = asyncio.create_task(beside())
        while "request-1001" not in engine._loop._sinks:
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="'request-1001' is in use"):
            engine.generate([prompt(40, 36), prompt(40, 37)], SHORT, progress=False)
        gate.set()
        return await running

    assert asyncio.run(both())[-1] == "length"
    assert not engine._loop._sinks


def test_a_preempted_request_says_so(hybrid: Any) -> None:
    with Engine(hybrid, memory="400KiB", device="cpu") as engine:
        params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
        results = engine.generate([prompt(60, 40 + n) for n in range(5)], params, progress=False)
        records = [result.record for result in results]
        preempted = [record for record in records if record is not None and record.preemptions]
        assert preempted
        for record in preempted:
            assert "preempted" in [moment.what for moment in record.moments]
            assert codes(record)[-1] == "preempted"


def test_long_prefills_keep_their_record_short(hybrid: Any) -> None:
    with Engine(hybrid, memory="4MiB", device="cpu", max_num_batched_tokens=2, max_num_seqs=1) as engine:
        record = record_of(engine, prompt(400, 50))
        assert len(record.moments) <= 130
        computed = [moment for moment in record.moments if moment.what == "computes"]
        assert computed[0].start == 0
        assert computed[-1].end == 400
        assert record.moments[-1].what == "finished"


# --- sentences --------------------------------------------------------------------------------------------------------


def explained(**given: Any) -> Explanation:
    fields: dict[str, Any] = {
        "prompt_tokens": 2000,
        "position": 512,
        "matched_tokens": 1024,
        "missing": "state_missing",
        "parted_at": 1030,
        "block_tokens": 16,
        "checkpoint": None,
        "groups": (),
        "evicted": None,
        **given,
    }
    return Explanation(**fields)


def test_nothing_is_new_in_a_prompt_that_matches_to_its_end() -> None:
    found = reasons(explained(prompt_tokens=1030), 512, None, None, 0)
    assert [reason.code for reason in found] == ["state_missing"]


@pytest.mark.parametrize(
    ("lookup", "cached", "evicted", "store", "stated"),
    [
        (
            explained(),
            512,
            None,
            None,
            ["no state was kept between tokens 512 and 1,024: 512 tokens", "token 1,030 on"],
        ),
        (
            explained(evicted=Evicted(1008, 90.0, 7)),
            512,
            None,
            None,
            ["state at token 1,008 was evicted 90 s ago (7 r"],
        ),
        (explained(missing="window_missing"), 512, None, None, ["no window was kept"]),
        (explained(missing="tap_missing"), 512, None, None, ["no hidden states were kept", "token 1,030 on"]),
        (
            explained(matched_tokens=512, missing="never_seen"),
            512,
            Evicted(1500, 7300.0, 1),
            StoreAccount("nothing more"),
            ["cached up to token 1,500, and was evicted 2.0 h ago (1 request ago)", "no more"],
        ),
        (explained(), 1024, None, StoreAccount("loaded", 1024, 1024), ["The rest is new"]),
        (
            explained(position=418, matched_tokens=416, parted_at=418, prompt_tokens=438, missing="never_seen"),
            418,
            None,
            StoreAccount("nothing more"),
            ["The rest is new: no cached prompt goes on the same from token 418 on.", "no more"],
        ),
        (explained(matched_tokens=0, parted_at=0), 384, None, StoreAccount("loaded"), ["from token 384 on"]),
        (explained(), 1984, None, StoreAccount("loaded", 1984, 1984), []),
        (explained(), 512, None, StoreAccount("slow"), ["no state", "new", "did not answer in time"]),
        (explained(), 512, None, StoreAccount("no room", 1900), ["no state", "new", "no room to load"]),
        (explained(), 512, None, StoreAccount("lookup failed"), ["no state", "new", "could not be asked"]),
        (None, 0, None, None, []),
        (
            explained(position=0, matched_tokens=0, parted_at=0, missing="never_seen", is_apart=True),
            0,
            None,
            StoreAccount("nothing more"),
            ["No cached prompt with the same cache_salt begins", "The store has nothing of the prompt."],
        ),
    ],
)
def test_sentences(
    lookup: Explanation | None, cached: int, evicted: Evicted | None, store: StoreAccount | None, stated: list[str]
) -> None:
    found = reasons(lookup, cached, evicted, store, 0)
    texts = [reason.text for reason in found]
    for part in stated:
        assert any(part in text for text in texts), texts
    assert bool(texts) == bool(stated)
    assert all(text.endswith(".") for text in texts)
    assert all(reason.tokens >= 0 for reason in found)


# --- evictions --------------------------------------------------------------------------------------------------------


def test_what_was_evicted_of_a_reply_is_not_part_of_the_prompt(hybrid: Any) -> None:
    with Engine(hybrid, memory="400KiB", device="cpu") as engine:
        long = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        ids = prompt(50, 9)
        record_of(engine, ids, long)
        for number in range(30):
            record_of(engine, prompt(100, 100 + number))
        record = record_of(engine, ids, long)
        assert record.evicted is not None
        assert record.evicted.position == 48  # where the prompt could have resumed
        [reason] = [reason for reason in record.why if reason.code == "evicted"]
        assert (reason.position, reason.tokens) == (48, 48 - record.cached_tokens)


def test_an_evicted_state_before_what_a_store_has_loaded_cost_nothing() -> None:
    gone = Evicted(32, 1.0, 1)
    lookup = Explanation(200, 0, 160, "state_missing", 160, 16, None, (), gone)
    [state, *_] = reasons(lookup, 64, None, StoreAccount("loaded", 64, 64), 0)
    assert (state.code, state.position, state.tokens) == ("state_missing", 160, 96)


def test_what_a_preempted_request_has_lost_itself_was_not_cached_before(hybrid: Any) -> None:
    with Engine(hybrid, memory="400KiB", device="cpu") as engine:
        long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        results = engine.generate([prompt(60 + i, 500 + i) for i in range(6)], long, progress=False)
        records = [result.record for result in results if result.record is not None]
        assert sum(record.preemptions for record in records) > 2
        for record in records:
            assert record.evicted is None
            assert codes(record)[0] == "never_seen"


def test_every_group_supplies_what_the_request_resumed_from(hybrid: Any) -> None:
    """A reply that ends inside a block is continued there."""
    with Engine(hybrid, memory="4MiB", device="cpu") as engine:
        ids = prompt(19, 1)
        reply = engine.generate([ids], SHORT, progress=False)[0].token_ids
        record = record_of(engine, ids + list(reply) + prompt(40, 2))
        assert record.lookup is not None
        assert record.lookup.position == 20
        assert min(group.supplies for group in record.lookup.groups) == 20


def test_what_was_dropped_by_hand_was_not_evicted(hybrid: Any) -> None:
    """A state of it was evicted before: that is not why the prompt is gone."""
    with Engine(hybrid, memory="300KiB", device="cpu") as engine:
        ids, cache, call = prompt(100, 9), engine._core.cache, engine._loop.call
        record_of(engine, ids)
        for number in range(40):
            record_of(engine, prompt(40, 100 + number))
            if call(lambda: cache.explain(cache.match(ids))).evicted is not None:
                break
        _, first, *_ = call(lambda: cache.match(ids)).found.path
        assert engine.inspection.drop_prefix(first.node.keys[0])
        record = record_of(engine, ids)
        assert record.evicted is None
        assert codes(record) == ["never_seen"]
