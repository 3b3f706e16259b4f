"""Where a run of the tests spends its time: `pytest --timings` ends with its parts and its ten slowest tests.

A part is a folder of tests, or a file beside these folders. Its seconds are those of all processes that run tests.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

_SLOWEST = 10


class Timings:
    """Counts what each test took, with its fixtures."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.processes: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.processes.add(getattr(report, "worker_id", ""))
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        num_processes = max(1, len(self.processes))
        tests: Counter[str] = Counter()
        parts: dict[str, float] = {}
        for test, seconds in self.seconds.items():
            tests[_part(test)] += 1
            parts[_part(test)] = parts.get(_part(test), 0.0) + seconds
        elapsed, worked = time.monotonic() - self.started, sum(parts.values())
        lines = [f"{'part':24} {'tests':>6} {'seconds':>8}"]
        lines += [f"{part:24} {tests[part]:6} {seconds:8.1f}" for part, seconds in _largest(parts)]
        lines.append(f"{'all':24} {sum(tests.values()):6} {worked:8.1f}")
        share = worked / (elapsed * num_processes)
        lines.append(f"{elapsed:.0f} s with {num_processes} processes, which were in tests for {share:.0%} of it")
        lines.append("slowest, fixtures included:")
        lines += [f"{seconds:8.1f} s {test}" for test, seconds in _largest(self.seconds)[:_SLOWEST]]
        return lines


def _largest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda one: -one[1])


def _part(test: str) -> str:
    """tests/engine/test_x.py::test_y -> tests/engine"""
    path = test.partition("::")[0].split("/")
    return "/".join(path[:2]) if len(path) > 1 else path[0]


# --- pytest's hooks ---------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timings", action="store_true", help="end with the time of each part and the slowest tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("timings") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Timings())
