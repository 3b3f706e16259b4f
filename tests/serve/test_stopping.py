"""A server that stops: what is still there when its patience ends is told so, and counted as what it is."""

from __future__ import annotations

import json
import logging
import socket
import threading
from typing import Any

import pytest

from hybridkv import Engine
from hybridkv.serve import Server
from tests.engine.zoo import prompt
from tests.patience import Stopwatch
from tests.serve.serving import Client, Pace, Served, eventually, serving

STOPPING = "the server is stopping, before the reply was complete: send the request again"


def outcomes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of all requests; nothing else may have gone wrong."""
    assert not [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    facts: list[dict[str, Any]] = [record.__dict__["facts"] for record in caplog.records if record.msg == "request"]
    return [one["outcome"] for one in facts if one["path"] == "/v1/completions"]


def slow_body(served: Served) -> socket.socket:
    """A client that has sent a part of its request."""
    connection = socket.create_connection(("127.0.0.1", int(served.url.split(":")[-1])))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
    return connection


def test_those_that_are_cut_short_are_told(engine: Engine, pace: Pace, caplog: pytest.LogCaptureFixture) -> None:
    """Running or in the queue, streamed or whole: eight may run at once, the last two wait."""
    caplog.set_level(logging.INFO, "hybridkv.serve")
    with serving(engine, shutdown_timeout=0) as served:
        streams = [Client(served, prompt=prompt(5, seed), stream=True) for seed in range(5)]
        wholes = [Client(served, prompt=prompt(5, seed)) for seed in range(5, 10)]
        assert eventually(lambda: pace.num_waiting == 10)
        pace.advance(3)
    for client in streams:
        *_, error, done = client.read_all().decode().split("data: ")
        assert json.loads(error.partition("\n")[0])["error"]["message"] == STOPPING
        assert done.startswith("[DONE]")
    for client in wholes:
        head, _, body = client.read_all().decode().partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 503")
        assert json.loads(body)["error"]["message"] == STOPPING
    assert outcomes(caplog) == ["stopped"] * 10
    pace.run()
    assert eventually(lambda: not engine._core.has_work)


def test_a_request_that_has_not_arrived_whole(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybridkv.serve")
    with serving(engine, shutdown_timeout=0) as served:
        connection = slow_body(served)
        assert served.http.get("/health").status_code == 200
    with connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 503")
    assert outcomes(caplog) == ["stopped"]


class NarrowServer(Server):
    """One whose sockets hold little."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def test_a_client_that_does_not_read_is_hung_up_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hybridkv.serve")
    monkeypatch.setattr("tests.serve.serving.Server", NarrowServer)
    with serving(engine, shutdown_timeout=0) as served:
        client = Client(served, prompt=prompt(20, 1), logprobs=60, stream=True)
        assert eventually(lambda: engine._core.has_work)
        assert eventually(lambda: not engine._core.has_work)
        start = Stopwatch()
    assert start.seconds < 5
    client.vanish()
    assert outcomes(caplog) == ["stopped"]


def test_a_long_text_holds_nobody_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the server's end nor the process': nothing stops a tokenizer."""
    has_begun, may_end, tokenizing = threading.Event(), threading.Event(), []

    def slow(text: Any, **named: Any) -> Any:
        tokenizing.append(threading.current_thread())
        has_begun.set()
        may_end.wait(10)
        raise AssertionError("nobody waits for it")

    caplog.set_level(logging.INFO, "hybridkv.serve")
    monkeypatch.setattr(engine, "prepare", slow)
    with serving(engine, shutdown_timeout=0) as served:
        client = Client(served, prompt="x" * 300_000)
        assert has_begun.wait(10)
    [thread] = tokenizing
    assert thread.is_alive()
    assert thread.daemon
    assert client.read_all().startswith(b"HTTP/1.1 503")
    assert outcomes(caplog) == ["stopped"]
    may_end.set()
    thread.join(10)
    assert not thread.is_alive()
