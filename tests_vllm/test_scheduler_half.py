"""The scheduler's half alone: room in host memory for what is fetched and saved. Lookups are answered at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hosted import FAMILIES, grouped
from vllm import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from hybridkv.errors import InputError
from hybridkv.integrations.vllm import HybridKVConnector, connector, scheduler
from hybridkv.integrations.vllm.catalogue import make_catalogue, refuse_small_buffers
from hybridkv.integrations.vllm.messages import WorkerReport
from hybridkv.integrations.vllm.scheduler import SchedulerHalf
from hybridkv.integrations.vllm.settings import Settings
from hybridkv.units import parse_size

FAMILY = FAMILIES["qwen3_next"]
HIT = 48


def settings(**changes: Any) -> Settings:
    given: dict[str, Any] = {
        "store": ("memory://?size=1MiB",),
        "staging_bytes": 1 << 20,
        "waiting_bytes": 1 << 20,
        "layerwise": True,
        "lookup_timeout_s": 1.0,
        "load_timeout_s": 1.0,
        "loads": True,
        "saves": True,
        "separate": False,
    }
    return Settings(**(given | changes))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SchedulerHalf]]:
    """A scheduler's half of a tiny Qwen3-Next, whose store has the first `HIT` tokens of every prompt."""
    monkeypatch.setattr(scheduler, "model_spec", lambda *_, **__: FAMILY.model())
    monkeypatch.setattr(scheduler, "model_identity", lambda _: "weights")
    halves = []

    def started(**changes: Any) -> SchedulerHalf:
        config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        half = SchedulerHalf(config, grouped(FAMILY.specs(1)), settings(**changes))  # type: ignore[arg-type]
        found = SimpleNamespace(is_late=False, is_answered=True, has_failed=False, position=HIT, matched=HIT)
        found.wait = lambda _: None
        half._finder.find = lambda *_: found
        halves.append(half)
        return half

    yield started
    for half in halves:
        half.close()


def request(name: str) -> Request:
    return Request(name, [7] * 100, SamplingParams(max_tokens=4), None)


def report(half: SchedulerHalf, name: str, is_there: bool) -> None:
    half.reported(KVConnectorOutput(kv_connector_worker_meta=WorkerReport({name: [is_there]})))


def fetched(half: SchedulerHalf) -> list[str]:
    """Requests whose bytes workers have been told to fetch so far."""
    return [order.request for order in half._orders.fetches]


def allocate(half: SchedulerHalf, one: Request) -> None:
    report(half, one.request_id, True)
    assert half.matched(one, 0) == HIT
    half.allocated(one, [[1, 2, 3], [1, 2, 3]], HIT)


def end(half: SchedulerHalf, one: Request) -> None:
    one.status = RequestStatus.FINISHED_ABORTED
    half.finished(one, [[], []])


def compute(half: SchedulerHalf, one: Request) -> None:
    report(half, one.request_id, True)
    half.give_up(one)
    assert half.matched(one, 0) == 0


WAYS: dict[str, Callable[[SchedulerHalf, Request], Any]] = {
    "its blocks are allocated": allocate,
    "its read fails": lambda half, one: report(half, one.request_id, False),
    "it is aborted while it is read": end,
    "its hit is given up": compute,
    "vLLM's own cache has it by now": lambda half, one: (report(half, one.request_id, True), half.matched(one, 64)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_request_no_longer_needs_is_room_for_the_next(way: str, start: Callable[..., SchedulerHalf]) -> None:
    """One hit fits. The next one waits for it, whatever becomes of the first."""
    half = start()
    half = start(staging_bytes=half._catalogue.load_bytes(0, HIT) * 3 // 2)
    first = request("0")
    assert half.matched(first, 0) is None
    for number in range(1, 4):
        following = request(str(number))
        assert half.matched(following, 0) is None
        assert fetched(half) == [str(one) for one in range(number)]
        WAYS[way](half, first)
        assert half.matched(following, 0) is None
        assert fetched(half) == [str(one) for one in range(number + 1)]
        first = following
    end(half, first)
    assert half._staged_bytes == 0


def test_a_hit_that_does_not_fit_is_computed_and_counted(start: Callable[..., SchedulerHalf]) -> None:
    half = start()
    one = request("one")
    half.matched(one, 0)
    report(half, "one", True)
    assert half.matched(one, 0) == HIT
    half.give_up(one)
    half.give_up(one)
    assert half.counts["no_room"] == 1
    assert half._orders.drops == ["one"]
    assert half.matched(one, 0) == 0
    half.give_up(request("never seen"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["staging", "waiting"])
def test_a_buffer_in_which_nothing_ever_fits_is_refused(name: str, family: str) -> None:
    """The size that the error names is accepted, and holds what it must: the smallest hit, or the largest object."""
    catalogue = make_catalogue(FAMILIES[family].model())
    with pytest.raises(InputError) as error:
        refuse_small_buffers(catalogue, settings(**{f"{name}_bytes": 1000}))
    assert f"{name} is 1,000 B" in str(error.value)
    enough = parse_size(str(error.value).rpartition(f"set {name} to ")[2].removesuffix(" or more"))
    objects = [group.nbytes(catalogue.num_tokens(group, 256_000)) for group in catalogue.groups]
    assert enough >= (catalogue.load_bytes(0, 16) if name == "staging" else max(objects))
    refuse_small_buffers(catalogue, settings(**{f"{name}_bytes": enough}))


def test_a_buffer_that_is_not_used_may_be_small() -> None:
    catalogue = make_catalogue(FAMILY.model())
    refuse_small_buffers(catalogue, settings(staging_bytes=1, loads=False))
    refuse_small_buffers(catalogue, settings(waiting_bytes=1, saves=False))


def test_a_start_with_a_buffer_that_is_too_small(start: Callable[..., SchedulerHalf]) -> None:
    with pytest.raises(InputError, match="waiting is 1,000 B, and 256 tokens take"):
        start(waiting_bytes=1000)


@pytest.mark.parametrize(("other", "is_here"), [("ours", True), ("another engine's", False), ("multi", False)])
def test_only_a_worker_of_this_engine_saves_ends_at_once(
    other: str, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a `MultiConnector` another connector may write to free blocks outside of the order of streams."""
    ours, theirs = (object.__new__(HybridKVConnector) for _ in range(2))
    ours._engine_id = "one"
    theirs._engine_id = "one" if other == "ours" else "two"
    theirs._worker = worker = object()  # type: ignore[assignment]
    group = SimpleNamespace(connectors=[theirs]) if other == "multi" else theirs
    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(connector, "get_kv_transfer_group", lambda: group)
    assert ours._worker_here() is (worker if is_here else None)
    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: False)
    assert ours._worker_here() is None
