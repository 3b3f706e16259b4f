"""The stream of live events: made once for all readers, only while there are some, and never queued for slow ones."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from hybridkv import Engine
from hybridkv.engine.inspection.publishing import Snapshot
from hybridkv.errors import EngineError
from hybridkv.serve import inspection, live
from hybridkv.serve.live import Live
from hybridkv.serve.streams import data_event
from tests.engine.zoo import prompt
from tests.patience import Stopwatch
from tests.serve.serving import PATIENCE_S, Served, error_of, eventually, serving

PATH = "/v1/hybridkv/live"
Event = tuple[str, Any]


@contextmanager
def listening(served: Served, topics: str | None = None) -> Iterator[Iterator[Event]]:
    """Events as they come; comments have the name ":"."""
    params = {} if topics is None else {"topics": topics}
    with served.http.stream("GET", PATH, params=params) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        yield _events(response.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[Event]:
    name = ""
    for line in lines:
        if line.startswith(":"):
            yield ":", line[1:].strip()
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def until(events: Iterator[Event], holds: Callable[[str, Any], bool]) -> Any:
    return next(data for name, data in events if holds(name, data))


@pytest.fixture
def served(engine: Engine) -> Iterator[Served]:
    """A server of its own: an engine's records go to the server that was started last."""
    with serving(engine) as served:
        yield served
        assert eventually(lambda: served.metrics()["hybridkv_inspection_streams"] == 0)


class Changing:
    """An engine that has a new snapshot of some size whenever it is asked."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.version = 0
        self._size = size
        monkeypatch.setattr(engine.inspection, "latest", self.latest)
        monkeypatch.setattr(live, "PERIOD_S", 0.005)
        monkeypatch.setattr(live, "_FIRST_PERIOD_S", 0.005)

    def latest(self, topic: str) -> Snapshot:
        self.version += 1
        return Snapshot(self.version, {"version": self.version, "filling": "x" * self._size})


def test_the_first_events_come_at_once_and_then_what_is_new(served: Served) -> None:
    served.post("/v1/completions", prompt=prompt(40), max_tokens=2)
    start = Stopwatch()
    with listening(served) as events:
        first: dict[str, Any] = {}
        while len(first) < 4:
            name, data = next(events)
            if name != "prefixes" or data["nodes"]:  # an earlier reader may have left an older snapshot
                first.setdefault(name, data)
        assert start.seconds < 5
        assert set(first) == {"memory", "steps", "prefixes", "requests"}
        assert first["memory"]["num_slabs"] == len(first["memory"]["owners"]) * first["memory"]["slabs_per_cell"]
        assert first["prefixes"]["nodes"][0]["head"]
        assert first["requests"]["requests"][-1]["prompt_tokens"] == 40
        reply = served.post("/v1/completions", prompt=prompt(41, 7), max_tokens=2).json()
        new = until(events, lambda name, data: name == "requests")
        assert [one["id"] for one in new["requests"]] == [reply["id"]]
    assert first["steps"]["steps"]


def test_steps_come_once_and_in_order(served: Served) -> None:
    with listening(served, "steps") as events:
        _, data = next(events)
        seen = [step["n"] for step in data["steps"]]
        for seed in range(3):
            served.post("/v1/completions", prompt=prompt(20, seed), max_tokens=4)
            seen += [step["n"] for step in next(events)[1]["steps"]]
    assert seen == list(range(seen[0], seen[0] + len(seen)))
    assert len(seen) <= 300 + 12


def test_only_what_was_asked_for_comes(served: Served) -> None:
    with listening(served, "requests,steps") as events:
        assert [next(events)[0] for _ in range(2)] == ["steps", "requests"]
    with listening(served, "memory") as events:
        assert next(events)[0] == "memory"


@pytest.mark.parametrize("topics", ["", "x", "memory,", "memory,steps,x", "Memory"])
def test_unknown_topics_are_refused(served: Served, topics: str) -> None:
    error = error_of(served.http.get(PATH, params={"topics": topics}), 400)
    assert error["param"] == "topics"
    assert "choose some of memory, steps, prefixes, requests" in error["message"]


def test_others_see_their_own_requests(engine: Engine) -> None:
    def headers(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    with serving(engine, api_keys=("a", "b")) as served:
        served.http.headers.update(headers("a"))
        with listening(served, "requests") as events:
            assert next(events) == ("requests", {"requests": []})
            body = {"prompt": [5, 6], "max_tokens": 1}
            served.http.post("/v1/completions", json=body, headers=headers("b"))
            mine = served.http.post("/v1/completions", json=body).json()["id"]
            assert [one["id"] for one in next(events)[1]["requests"]] == [mine]


def test_a_snapshot_is_sent_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine.inspection, "latest", lambda topic: Snapshot(1, {}))
    monkeypatch.setattr(live, "PERIOD_S", 0.01)
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.2)
    with listening(served, "memory") as events:
        assert [next(events) for _ in range(3)] == [("memory", {}), (":", "alive"), (":", "alive")]


def test_heartbeats(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(live, "PERIOD_S", 0.01)
    with listening(served, "requests") as events:
        assert [next(events) for _ in range(3)][1:] == [(":", "alive")] * 2


def test_a_snapshot_is_serialized_once_for_all(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    changing = Changing(served.engine, monkeypatch, size=10)
    made: list[int] = []

    def counted(data: str, name: str | None = None) -> bytes:
        made.append(json.loads(data)["version"])
        return data_event(data, name)

    monkeypatch.setattr(live, "data_event", counted)
    with ExitStack() as stack:
        streams = [stack.enter_context(listening(served, "memory")) for _ in range(8)]
        got = [[next(stream)[1]["version"] for _ in range(20)] for stream in streams]
    assert len(made) == len(set(made)) <= changing.version
    for one in got:
        assert one == sorted(set(one))
        assert set(one) <= set(made)


def test_a_slow_reader_misses_snapshots(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read nothing while megabytes were made: what was not sent yet is skipped, not kept."""
    changing = Changing(served.engine, monkeypatch, size=2**18)
    port = int(served.url.split(":")[-1])
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    slow.connect(("127.0.0.1", port))
    slow.sendall(f"GET {PATH}?topics=memory HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    with slow, listening(served, "memory") as fast:
        versions = [next(fast)[1]["version"] for _ in range(60)]
        assert versions == sorted(versions)
        before = changing.version
        slow.settimeout(PATIENCE_S)
        got: list[int] = []
        rest = b""
        while not got or got[-1] < before:
            rest += slow.recv(2**20)
            *lines, rest = rest.split(b"\n")
            found = [line.partition(b"data: ")[2] for line in lines if line.startswith(b"data: ")]
            got += [int(line[len(b'{"version": ') :].partition(b",")[0]) for line in found]
    behind = [version for version in got if version <= before]
    assert len(behind) < len(versions) / 2


def test_there_are_so_many_streams_and_no_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.MAX_STREAMS == 512
    monkeypatch.setattr(inspection, "Live", partial(Live, max_streams=2))
    with serving(engine) as served:
        with listening(served, "steps") as one, listening(served, "steps") as other:
            next(one), next(other)
            refused = served.http.get(PATH)
            assert "2 streams of live events are open" in error_of(refused, 429)["message"]
            assert refused.headers["retry-after"]
            assert served.metrics()["hybridkv_inspection_streams"] == 2
        assert eventually(lambda: served.metrics()["hybridkv_inspection_streams"] == 0)
        with listening(served, "steps") as one:
            next(one)


def test_one_key_leaves_streams_to_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS_PER_KEY", 1)
    with serving(engine, api_keys=("a", "b"), operator_key="o") as served:
        served.http.headers["Authorization"] = "Bearer a"
        with listening(served, "steps") as one:
            next(one)
            assert "open with this key" in error_of(served.http.get(PATH), 429)["message"]
            for key in ("b", "o"):
                served.http.headers["Authorization"] = f"Bearer {key}"
                with listening(served, "steps") as other:
                    next(other)


def test_nothing_is_made_while_nobody_reads(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[object] = []
    monkeypatch.setattr(served.engine.inspection, "watch", watched.append)
    monkeypatch.setattr(live, "PERIOD_S", 0.01)
    time.sleep(0.1)
    assert watched == []
    with listening(served, "steps") as events:
        next(events)
        assert eventually(lambda: len(watched) > 3)
    assert set(watched) == {frozenset()}, "steps are no snapshots"
    assert eventually(lambda: served.metrics()["hybridkv_inspection_streams"] == 0)
    count = len(watched)
    time.sleep(0.1)
    assert len(watched) == count


def test_streams_end_when_the_server_stops(engine: Engine) -> None:
    """At once, whatever time other requests have."""
    with ExitStack() as stack:
        served = stack.enter_context(serving(engine, shutdown_timeout=60))
        got: list[Event] = []

        def read() -> None:
            with listening(served) as events:
                got.extend(events)

        reader = threading.Thread(target=read)
        reader.start()
        assert eventually(lambda: len(got) >= 4)
        start = Stopwatch()
        stack.close()
        reader.join(PATIENCE_S)
        assert start.seconds < 10
    assert not reader.is_alive()
    assert got[-1][0] != "error"


def test_a_failed_engine_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise EngineError("the engine has failed: restart it")

    with listening(served, "requests") as events:
        next(events)
        monkeypatch.setattr(served.engine, "check_alive", fails)
        name, data = next(events)
        assert (name, data["error"]["message"]) == ("error", "the engine has failed: restart it")
        assert list(events) == []
