"""`stream` with a bytearray as memory and no engine, in one process and in two."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridkv.store import MemoryStore
from hybridkv.stream import HostPages
from tests.stream.halves import MIXES, SIZE, Finding, Moving, plan_of

TOKENS = list(range(1, 131))
RESUME = 128
"""The last whole block's end of a prompt of 130 tokens."""


@pytest.mark.parametrize("mix", MIXES)
def test_what_one_memory_left_fills_another(mix: str) -> None:
    store = MemoryStore(1 << 24)
    finding = Finding(plan_of(mix), store)
    first, second = Moving(plan_of(mix), store), Moving(plan_of(mix), store)
    assert first.run(finding.order(TOKENS)).num_good == 0
    order = finding.order(TOKENS)
    report = second.run(order)
    assert (report.num_wrong, report.failure, report.num_good) == (0, None, RESUME)
    assert second.stats.loads == {"layerwise": 1}
    finding.finder.close(2.0)
    for one in (first, second):
        one.mover.close(2.0, 2.0)


class LatePages(HostPages):
    """Work that is submitted runs when something waits for it, which is as late as a GPU may run it."""

    def __init__(self, buffer: bytearray | memoryview) -> None:
        super().__init__(buffer)
        self.submitted: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def order(self) -> Callable[[], None]:
        count = len(self.submitted)
        return lambda: self.run(count)

    def run(self, count: int) -> None:
        with self._lock:
            for number, action in enumerate(self.submitted[:count]):
                self.submitted[number] = lambda: None
                action()


@pytest.mark.parametrize("mix", MIXES)
def test_rows_are_copied_after_work_that_was_submitted_before_the_load(mix: str) -> None:
    """A slab that changes pools is zeroed, and the zeroing may not have run when the first row comes."""
    store = MemoryStore(1 << 24)
    finding, first = Finding(plan_of(mix), store), Moving(plan_of(mix), store)
    second = Moving(plan_of(mix), store, LatePages)
    first.run(finding.order(TOKENS))
    order = finding.order(TOKENS)
    pages, memory = second.pages, memoryview(second.memory)
    assert isinstance(pages, LatePages)

    def zero() -> None:
        memory[:] = bytes(len(memory))

    pages.submitted.append(zero)
    assert second.run(order).failure is None
    pages.run(1)
    assert not any(second.num_wrong(order, layer) for layer in range(second.plan.model.num_layers))
    finding.finder.close(2.0)
    for one in (first, second):
        one.mover.close(2.0, 2.0)


@pytest.mark.parametrize("mix", MIXES)
def test_an_object_that_is_gone_fails_its_load_and_nothing_else(mix: str) -> None:
    store = MemoryStore(1 << 24)
    finding, moving = Finding(plan_of(mix), store), Moving(plan_of(mix), store)
    moving.run(finding.order(TOKENS))
    order = finding.order(TOKENS)
    catalogue = finding.finder.catalogue
    group = catalogue.groups[-1]
    store.delete([catalogue.name(group, order.load_keys[RESUME])])
    report = moving.run(order)
    assert report.failure == "missing"
    assert report.num_good == (96 if catalogue.is_plain else 0)
    again = moving.run(finding.order(TOKENS))
    assert again.failure is None
    assert again.num_wrong == 0
    assert 0 <= again.num_good < RESUME, "what could not be found was not loaded"
    finding.finder.close(2.0)
    moving.mover.close(2.0, 2.0)


@pytest.mark.parametrize("mix", MIXES)
def test_finding_and_moving_in_two_processes(mix: str, tmp_path: Path) -> None:
    """The second prompt parts from the first at 100, after a breakpoint at 40; the third is the first again."""
    command = [sys.executable, "-m", "tests.stream.halves", "finding", mix, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    shared = {"full": 96, "window": 96, "state": 32, "all": 32, "states only": 32}[mix]
    assert done.stdout.split() == ["0", str(shared), str(RESUME)]


def test_a_page_that_is_missing_leaves_its_objects_out() -> None:
    """A window has left the last blocks behind: without them others could not resume there."""
    store = MemoryStore(1 << 24)
    finding, moving = Finding(plan_of("window"), store), Moving(plan_of("window"), store)
    order = finding.order(TOKENS)
    name = next(group.name for group in finding.finder.catalogue.groups if group.name.startswith("window"))
    blocks = dict(order.step.blocks)
    blocks[name] = [0] * (RESUME // SIZE) + list(blocks[name][RESUME // SIZE :])
    outgoing = moving.mover.dump(order.step._replace(blocks=blocks), order.points, order.keys)
    assert {one.group.name for one in outgoing} == {"full"}
    assert {one.position for one in outgoing} == {32, 64, 96, 128}
    for one in outgoing:
        moving.mover._dumper.judge(one, False)
    finding.finder.close(2.0)
    moving.mover.close(2.0, 2.0)
