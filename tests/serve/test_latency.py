"""Replies on a kept connection are not held back: Nagle's algorithm would wait 40 ms for the client's delayed ACK."""

from __future__ import annotations

import time

from tests.serve.serving import Served


def test_a_kept_connection_answers_at_once(served: Served) -> None:
    def seconds() -> float:
        start = time.monotonic()
        served.http.post("/v1/completions", json={"prompt": ""})
        return time.monotonic() - start

    spent = [seconds() for _ in range(60)]  # the kernel acknowledges the first packets of a connection at once
    assert min(spent[-20:]) < 0.03
