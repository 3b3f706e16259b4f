"""Snapshots for those who watch: built on demand, within their share of the time of steps, and true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybridkv import Engine, SamplingParams
from hybridkv.engine.inspection.publishing import SHARE, Publishing, Topic
from hybridkv.errors import RequestError
from tests.engine.zoo import fresh, prompt

SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return fresh("qwen3_next")


@pytest.fixture
def engine(hybrid: Any) -> Iterator[Engine]:
    with Engine(hybrid, memory="4MiB", device="cpu") as started:
        yield started
        started.check_integrity()


def snapshot(engine: Engine, topic: str) -> dict[str, Any]:
    engine._core.publishing.hasten()
    engine.inspection.watch([topic])
    engine.check_integrity()  # on the engine's thread, after the snapshot
    found = engine.inspection.latest(topic)
    assert found is not None
    return found.data


def serve(engine: Engine, *ids: list[int]) -> None:
    engine.generate(list(ids), SHORT, progress=False)


# --- the rule ---------------------------------------------------------------------------------------------------------


class Watched:
    """A topic that takes as long as it is told, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy_s, self.version, self.has_work, self.cost_s, self.built = 0.0, 0.0, 0, True, 0.01, 0
        monkeypatch.setattr("hybridkv.engine.inspection.publishing.time.monotonic", lambda: self.now)
        monkeypatch.setattr("hybridkv.engine.inspection.publishing.time.perf_counter", lambda: self.now)
        self.publishing = Publishing(lambda: self.busy_s, lambda: self.has_work)
        self.publishing.topics["one"] = Topic(0.5, lambda: self.version, self.build)

    def build(self) -> dict[str, Any]:
        self.now += self.cost_s
        self.built += 1
        return {"version": self.version}

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.version += 1
        self.publishing.refresh()


def test_nothing_is_built_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.busy_s = 1e6
    watched.wait(1)
    assert (watched.built, watched.publishing.latest("one")) == (0, None)
    watched.publishing.watch(["one"])
    watched.wait(1)
    assert watched.built == 1
    watched.wait(60)
    assert watched.built == 1  # the watcher has gone


def test_snapshots_stay_within_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for _ in range(4000):
        watched.busy_s += 0.1
        watched.publishing.watch(["one"])
        watched.wait(0.1)
        most = SHARE * watched.busy_s
        assert watched.publishing.seconds <= max(most, watched.cost_s)  # the cost of the first is not known before
    assert watched.publishing.seconds == pytest.approx(0.01 * watched.built)
    assert 300 < watched.built <= 400  # 1% of 400 s, 10 ms each


def test_no_share_is_needed_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.has_work = False
    watched.publishing.watch(["one"])
    watched.wait(0)
    watched.wait(0.1)
    assert watched.built == 1  # not so soon
    watched.wait(1)
    assert (watched.built, watched.publishing.seconds) == (2, 0.0)
    watched.version -= 1
    watched.wait(1)
    assert watched.built == 2  # nothing has changed


# --- an engine --------------------------------------------------------------------------------------------------------


def test_the_map_adds_up(engine: Engine) -> None:
    serve(engine, prompt(200, 1), prompt(90, 2))
    shown, use = snapshot(engine, "memory"), engine.stats().memory
    parts = shown["bytes"]
    assert parts["total"] == use.total_bytes
    assert parts["free"] == use.free_bytes
    owned = sum(use.slab_bytes.values())
    assert parts["used"] + parts["unused"] + parts["padding"] == owned
    assert {group["name"]: group["slabs"] * shown["slab_bytes"] for group in shown["groups"]} == use.slab_bytes
    assert shown["owners"].count(-1) * shown["slab_bytes"] == use.free_bytes
    assert shown["owners"][0] == -2
    assert all(bool(used) == (owner >= 0) for owner, used in zip(shown["owners"], shown["used"], strict=True))
    ends = [one for one in shown["next_evictions"] if one["what"] == "checkpoint"]
    assert ends
    assert all(one["bytes"] > 0 and one["idle_s"] >= 0 for one in ends)


def test_steps_are_noted_with_their_parts(engine: Engine) -> None:
    serve(engine, prompt(100, 3))
    steps = engine.inspection.steps_since(0)
    assert sum(step["prompt_tokens"] for step in steps) == 100
    assert sum(step["reply_tokens"] for step in steps) == 2  # the first comes with the prompt
    stats = engine.stats()
    for part, seconds in stats.seconds.items():
        assert sum(step[part] for step in steps) <= seconds
    assert stats.publish_seconds < sum(stats.seconds.values())
    last = steps[-1]["n"]
    assert engine.inspection.steps_since(last) == []
    serve(engine, prompt(100, 3))
    assert engine.inspection.steps_since(last)[0]["n"] == last + 1


def test_a_pin_keeps_a_prefix(hybrid: Any) -> None:
    with Engine(hybrid, memory="600KiB", device="cpu") as engine:
        kept = prompt(100, 10)
        serve(engine, kept)
        [node] = snapshot(engine, "prefixes")["nodes"]
        key = bytes.fromhex(node["key"])
        assert engine.inspection.pin_prefix(key, 60) == 102
        for number in range(30):
            serve(engine, prompt(100, 20 + number))
        [pinned] = [one for one in snapshot(engine, "prefixes")["nodes"] if one["pinned"]]
        assert (pinned["key"], pinned["leases"]) == (node["key"], 0)
        assert engine.stats().memory.pinned_bytes > 0
        [result] = engine.generate([kept], SHORT, progress=False)
        assert result.cached_tokens == 96
        assert engine.inspection.unpin_prefix(key)
        assert not engine.inspection.unpin_prefix(key)
        for number in range(30):
            serve(engine, prompt(100, 60 + number))
        [result] = engine.generate([kept], SHORT, progress=False)
        assert result.cached_tokens < 96
        engine.check_integrity()


def test_pins_leave_half_of_the_memory(hybrid: Any) -> None:
    with Engine(hybrid, memory="600KiB", device="cpu") as engine:

        def pin_all(count: int) -> None:
            for number in range(count):
                serve(engine, prompt(100, number))
                for node in snapshot(engine, "prefixes")["nodes"]:
                    engine.inspection.pin_prefix(bytes.fromhex(node["key"]), 60)

        with pytest.raises(RequestError, match="more than half of the memory"):
            pin_all(12)
        stats = engine.stats().memory
        assert stats.pinned_bytes <= 0.5 * stats.total_bytes
        serve(engine, prompt(100, 99))
        engine.check_integrity()


def test_a_dropped_prefix_is_computed_again(engine: Engine) -> None:
    shared = prompt(96, 30)
    serve(engine, shared + prompt(40, 31))
    serve(engine, shared + prompt(40, 32))
    nodes = snapshot(engine, "prefixes")["nodes"]
    [root] = [node for node in nodes if node["parent"] is None]
    below = [node for node in nodes if node["parent"] == root["key"]]
    assert (root["end"], len(below)) == (96, 2)
    found = engine.inspection.prefix_tokens(bytes.fromhex(below[0]["key"]))
    assert found is not None
    assert (found.start, found.token_ids[:96]) == (96, shared)
    engine.inspection.pin_prefix(bytes.fromhex(below[0]["key"]), 60)
    assert engine.inspection.drop_prefix(bytes.fromhex(root["key"])) == sum(n["end"] - n["start"] for n in nodes)
    assert engine.inspection.prefix_tokens(bytes.fromhex(root["key"])) is None
    assert engine.stats().memory.pinned_prefixes == 0
    [result] = engine.generate([shared], SHORT, progress=False)
    assert result.cached_tokens == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda inspection: inspection.pin_prefix(b"none", 60) == 0,
        lambda inspection: inspection.drop_prefix(b"none") == 0,
        lambda inspection: inspection.prefix_tokens(b"none") is None,
        lambda inspection: not inspection.unpin_prefix(b"none"),
    ],
)
def test_keys_of_nothing(engine: Engine, call: Callable[[Any], bool]) -> None:
    assert call(engine.inspection)
