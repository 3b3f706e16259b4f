"""The history of requests: bounded by requests and by tokens, whatever order things come in."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hybridkv.engine import RequestRecord
from hybridkv.engine.inspection.record import Span
from hybridkv.engine.prompts import pack_ids
from hybridkv.serve import history as module
from hybridkv.serve.access import Caller
from hybridkv.serve.history import Entry, History, PromptEntry

OPERATOR = Caller("", True)
NO_TIMES: dict[str, Any] = dict.fromkeys(("began_s", "queue_s", "ttft_s", "total_s", "per_token_s"), 0.5)


def record(name: str, tokens: int = 4) -> RequestRecord:
    return RequestRecord(
        request_id=name,
        arrived_at=1.0,
        finish_reason="stop",
        prompt=pack_ids(list(range(tokens))),
        reply_tokens=1,
        cached_tokens=0,
        breakpoints=(),
        kept=(),
        spans=(Span(0, tokens, "computed"),),
        lookup=None,
        evicted=None,
        store=None,
        moments=(),
        rows=(),
        layers=(),
        preemptions=0,
        **NO_TIMES,
    )


def entry(name: str, *, prompts: int = 1, owner: str = "", request_id: str = "x") -> Entry:
    return Entry(name, request_id, owner, "/v1/completions", "tiny", 4, [PromptEntry() for _ in range(prompts)])


def ended(history: History, name: str, tokens: int = 4, **fields: Any) -> Entry:
    one = entry(name, **fields)
    history.begin(one)
    for number in range(len(one.prompts)):
        history.receive(record(f"{name}-{number}", tokens))
    history.end(name, "completed")
    return one


def names(history: History) -> list[str]:
    return [one.id for one in history.latest(OPERATOR, 10**6)]


def test_the_oldest_ended_requests_are_forgotten() -> None:
    history = History(max_requests=3)
    running = entry("slow")
    history.begin(running)
    for number in range(5):
        ended(history, f"r{number}")
    assert sorted(names(history)) == ["r2", "r3", "r4", "slow"]
    assert history.num_tokens == 12
    history.end("slow", "disconnected")
    assert sorted(names(history)) == ["r3", "r4", "slow"]
    assert history.find("r0", OPERATOR) is None


def test_the_oldest_lose_their_token_ids_first() -> None:
    history = History(max_requests=10, max_tokens=10)
    first, second, third = (ended(history, f"r{number}") for number in range(3))
    assert history.num_tokens == 8
    assert first.prompts[0].record is None
    before = record("r0-0").to_json()
    assert first.to_json()["prompts"] == [before]
    assert second.prompts[0].record is not None
    assert third.prompts[0].record is not None
    huge = ended(history, "huge", tokens=11)
    assert history.num_tokens == 0
    assert huge.to_json()["prompts"][0]["prompt_tokens"] == 11


def test_nothing_is_kept_if_so_wished() -> None:
    history = History(max_requests=0)
    ended(history, "r")
    assert names(history) == []
    assert history.num_requests == history.num_tokens == history.last_number == 0


def test_records_of_others_are_ignored() -> None:
    history = History()
    for name in ("request-7", "unknown-0", "-", "", "r"):
        history.receive(record(name))
    ended(history, "r")
    history.receive(record("r-0", tokens=400))
    history.settle()
    assert history.num_tokens == 4


def test_a_record_that_comes_late_is_taken_and_its_request_is_numbered_then() -> None:
    history = History()
    late = entry("late", prompts=2)
    history.begin(late)
    history.receive(record("late-1"))
    history.end("late", "disconnected")
    assert [one is None for one in late.to_json()["prompts"]] == [True, False]
    assert history.numbered_since(0, OPERATOR, 9) == []
    history.receive(record("late-0"))
    history.settle()
    assert None not in late.to_json()["prompts"]
    assert history.numbered_since(0, OPERATOR, 9) == [late]


def test_a_request_whose_records_never_come_is_numbered_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LATE_S", -1.0)
    history = History()
    lost = entry("lost")
    history.begin(lost)
    history.end("lost", "failed")
    assert history.numbered_since(0, OPERATOR, 9) == [lost]
    line = lost.line()
    history.receive(record("lost-0"))
    history.settle()
    assert history.numbered_since(0, OPERATOR, 9) == [lost], "only once"
    assert lost.line() != line


def test_news_are_numbered_in_order_and_cut_to_the_last() -> None:
    history = History(max_requests=4)
    for number in range(6):
        ended(history, f"r{number}", owner="a" if number % 2 else "b")
    assert history.last_number == 6
    assert [one.id for one in history.numbered_since(3, OPERATOR, 9)] == ["r3", "r4", "r5"]
    assert [one.id for one in history.numbered_since(0, OPERATOR, 2)] == ["r4", "r5"]
    assert [one.id for one in history.numbered_since(0, Caller("a", False), 9)] == ["r3", "r5"]
    assert history.numbered_since(6, OPERATOR, 9) == []


def test_the_newest_of_a_request_id_is_found() -> None:
    history = History()
    for number in range(3):
        one = ended(history, f"r{number}", request_id="same", owner="ab"[number % 2])
        one.created = float(number)
    for name, owner, found in (("same", "a", "r2"), ("same", "b", "r1"), ("r0", "a", "r0")):
        got = history.find(name, Caller(owner, False))
        assert got is not None
        assert got.id == found
    assert history.find("r0", Caller("b", False)) is None
    assert history.find("same", Caller("c", False)) is None


def test_a_summary_adds_prompts_up() -> None:
    history = History()
    one = entry("r", prompts=2)
    history.begin(one)
    assert one.summary()["ttft_s"] is None
    first = replace(record("r-0"), cached_tokens=2, spans=(Span(0, 2, "memory"), Span(2, 4, "computed")))
    history.receive(first)
    history.receive(record("r-1"))
    history.end("r", "completed")
    found = one.summary()
    assert found["by_source"] == {"memory": 2, "store": 0, "engine": 0, "computed": 6}
    assert (found["cached_tokens"], found["reply_tokens"], found["ttft_s"]) == (2, 2, 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_books_are_right_after_anything(seed: int) -> None:
    chance = random.Random(seed)
    limit, most = chance.randint(1, 8), chance.randint(1, 40)
    history, alive, late = History(limit, most), [], []
    for number in range(300):
        if chance.random() < 0.4:
            alive.append((f"r{number}", chance.randint(1, 3)))
            history.begin(entry(alive[-1][0], prompts=alive[-1][1]))
        if alive and chance.random() < 0.4:
            name, prompts = alive.pop(chance.randrange(len(alive)))
            told = [f"{name}-{prompt}" for prompt in range(prompts)]
            chance.shuffle(told)
            cut = chance.randint(0, prompts)
            for one in told[:cut]:
                history.receive(record(one, chance.randint(0, 12)))
            late += told[cut:]
            history.end(name, "completed")
        if late and chance.random() < 0.3:
            history.receive(record(late.pop(chance.randrange(len(late))), chance.randint(0, 12)))
        history.settle()
        found = history.latest(OPERATOR, 10**6)
        assert len(found) == history.num_requests <= limit + len(alive)
        kept = [one.record.prompt.num_tokens for item in found for one in item.prompts if one.record is not None]
        assert sum(kept) == history.num_tokens <= most
        assert len(history._late) <= limit
        assert len(history._with_ids) == len(kept)
        assert not history._arrived


@pytest.mark.parametrize(
    ("code", "missing", "told"),
    [
        ("evicted", "never_seen", "evicted"),
        ("state_evicted", "state_missing", "evicted"),
        ("too_short", "never_seen", "below_block"),
        ("new", "never_seen", "never_seen"),
    ],
)
def test_the_list_tells_what_the_main_reason_tells(code: str, missing: str, told: str) -> None:
    prompt = {"why": [{"code": code}], "lookup": {"missing": missing}}
    assert module._missing(prompt) == told
