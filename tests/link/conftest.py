"""Processes of linked engines, ended whatever becomes of a test; and what tests have recorded, printed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.link.pairs import Pair, Pairs
from tests.link.workers import Workers


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with pairs of the same kind come one after another: starting two engines takes seconds."""
    places = [place for place, item in enumerate(items) if "pair" in getattr(item, "fixturenames", ()) and _kind(item)]
    for place, item in zip(places, sorted((items[place] for place in places), key=_kind), strict=True):
        items[place] = item


def _kind(item: Any) -> tuple[str, ...]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return tuple(params[name] for name in ("family", "transport") if name in params)


@pytest.fixture(scope="package")
def pairs() -> Iterator[Pairs]:
    kept = Pairs()
    yield kept
    kept.close()


@pytest.fixture
def pair(pairs: Pairs, family: str, transport: str) -> Iterator[Pair]:
    """A producer and a consumer of `family` with empty caches. Nothing of the test is left when it ends."""
    used = pairs.get(family, transport)
    try:
        yield used
        used.check_at_rest()
    except BaseException:
        pairs.drop(used)
        raise


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "link":
                    terminalreporter.write_line(str(value))
