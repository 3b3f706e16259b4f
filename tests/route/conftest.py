"""Stand-ins for one prefill and one decode worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.route.standins import StandIn, standing_in


@pytest.fixture
def prefill() -> Iterator[StandIn]:
    with standing_in("prefill") as one:
        yield one


@pytest.fixture
def decode() -> Iterator[StandIn]:
    with standing_in("decode") as one:
        yield one
