"""A sample of the tests that covers them in pairs: `pytest --sample 0.1`.

From every file the sample has each test function, and each pair of values of two parameters: each family with each
fault, each fault in each mode. A file with one test of 6 families, 16 faults and 2 modes has 192 cases and is covered
by 96. Most mistakes need one value or two that meet, few need three. Which case covers what is drawn, and so is a
share of the others, by a seed that pytest's first line prints.

    --sample 0          the covering cases
    --sample 0.1        the covering cases, and a tenth of the others
    --sample 0.1:0.5    another four tenths of the others, none of which the sample above has
"""

from __future__ import annotations

import heapq
import os
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import pytest

SEED_VARIABLE = "HYBRIDKV_TEST_SEED"
_INTERCHANGEABLE = {"seed"}
"""Parameters of which one value is as good as another: they need not all be covered."""


class Share(NamedTuple):
    """Which part of the cases that are not covering ones is run: from `start` up to `end`, in a drawn order."""

    start: float
    end: float
    with_covering: bool

    @classmethod
    def parse(cls, text: str) -> Share:
        first, colon, last = text.rpartition(":")
        try:
            share = cls(float(first or 0), float(last), with_covering=not colon)
        except ValueError:
            share = cls(1, 0, False)
        if not 0 <= share.start <= share.end <= 1:
            raise pytest.UsageError(f"--sample {text}: write a share such as 0.1, or a range such as 0.1:0.5")
        return share


def draw(cases: Sequence[Any], share: Share, seed: int) -> list[bool]:
    """Which cases of one file are run."""
    order = list(range(len(cases)))
    random.Random(f"{seed} {cases[0].nodeid.partition('::')[0]}").shuffle(order)
    covering = _cover([_covers(cases[index]) for index in order])
    chosen = [False] * len(cases)
    others = []
    for index, covers in zip(order, covering, strict=True):
        chosen[index] = covers and share.with_covering
        if not covers:
            others.append(index)
    for place, index in enumerate(others):
        chosen[index] = share.start <= (place + 0.5) / len(others) < share.end
    return chosen


def _cover(sets: Sequence[set[Any]]) -> list[bool]:
    """Which of the sets cover the union of all: the one that adds most first, of equals the first.

    A set never adds more than it did when there was less to add to, so only the set on top of the heap is counted anew.
    """
    chosen = [False] * len(sets)
    covered: set[Any] = set()
    heap = [(-len(one), place) for place, one in enumerate(sets)]
    heapq.heapify(heap)
    while heap:
        stated, place = heap[0]
        added = len(sets[place] - covered)
        if added and added < -stated:
            heapq.heapreplace(heap, (-added, place))
            continue
        heapq.heappop(heap)
        if added:
            covered |= sets[place]
            chosen[place] = True
    return chosen


def _covers(case: Any) -> set[Any]:
    """What a case covers: its test function, its parameters' values, and each pair of them."""
    params: dict[str, Any] = case.callspec.params if hasattr(case, "callspec") else {}
    values = [(name, _key(value)) for name, value in sorted(params.items()) if name not in _INTERCHANGEABLE]
    return {case.nodeid.partition("[")[0], *values, *combinations(values, 2)}


def _key(value: Any) -> Any:
    return value if _is_hashable(value) else id(value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


# --- pytest's hooks ---------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", metavar="SHARE", help="run a sample that covers every pair of parameters")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("sample") is not None:
        Share.parse(config.getoption("sample"))
        os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(10**6)))  # for all processes


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("sample") is not None and terminal is not None:
        terminal.write_line(
            f"{SEED_VARIABLE}={os.environ[SEED_VARIABLE]} --sample {session.config.getoption('sample')}"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("sample") is None:
        return
    share, seed = Share.parse(config.getoption("sample")), int(os.environ[SEED_VARIABLE])
    files: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        files.setdefault(item.nodeid.partition("::")[0], []).append(index)
    runs = [False] * len(items)
    for cases in files.values():
        for index, is_chosen in zip(cases, draw([items[index] for index in cases], share, seed), strict=True):
            runs[index] = is_chosen
    config.hook.pytest_deselected(items=[item for item, is_run in zip(items, runs, strict=True) if not is_run])
    items[:] = [item for item, is_run in zip(items, runs, strict=True) if is_run]
