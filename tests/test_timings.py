"""`make test` says where its time went."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.timings import Timings


def test_parts_and_the_slowest_tests() -> None:
    timings = Timings()
    timings.started -= 100
    took = {"tests/engine/test_a.py::test_x[1]": (1.0, 30.0), "tests/engine/decode/test_b.py::test_y": (20.0,)}
    for test, phases in {**took, "tests/test_c.py::test_z": (0.5,), "tests/test_c.py::test_w": (0.25, 0.25)}.items():
        for seconds in phases:
            report: Any = SimpleNamespace(nodeid=test, duration=seconds, worker_id=f"gw{int(seconds) % 2}")
            timings.pytest_runtest_logreport(report)
    lines = [" ".join(line.split()) for line in timings.lines()]
    assert lines[:4] == ["part tests seconds", "tests/engine 2 51.0", "tests/test_c.py 2 1.0", "all 4 52.0"]
    assert lines[4] == "100 s with 2 processes, which were in tests for 26% of it"
    assert lines[6] == "31.0 s tests/engine/test_a.py::test_x[1]"
    assert len(lines) == 6 + 4
