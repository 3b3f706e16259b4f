"""Connections that take their time: they shut no one out, and make room for others."""

from __future__ import annotations

import errno
import json
import logging
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from select import select
from typing import Any

import httpx
import pytest

from hybridkv import Engine
from hybridkv.errors import InputError
from hybridkv.serve import ConnectionLimits, Server
from hybridkv.serve.connection_limits import peer_of, room_for
from hybridkv.serve.connections import Connections, Stage
from tests.engine.zoo import prompt
from tests.serve.serving import PATIENCE_S, Client, Pace, Served, eventually, serving
from tests.serve.test_stopping import NarrowServer

HALF = b"GET /health HTTP/1.1\r\n"
WHOLE = HALF + b"Host: localhost\r\n\r\n"
POST = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


def connect(url: str, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    port = int(url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S, source_address=(source, 0))
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(65536) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.settimeout(PATIENCE_S)


def rest_of(connection: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def read_reply(connection: socket.socket, status: int) -> Any:
    """The body of one reply."""
    reply = HTTPResponse(connection)
    reply.begin()
    body = json.loads(reply.read())
    assert reply.status == status, body
    return body


def error_on(connection: socket.socket, status: int) -> str:
    return str(read_reply(connection, status)["error"]["message"])


def check_health(url: str) -> None:
    with connect(url, WHOLE) as connection:
        assert read_reply(connection, 200) == {"status": "ok"}


@contextmanager
def limited(engine: Engine, *limits: Any, **more: Any) -> Iterator[Served]:
    with serving(engine, connections=ConnectionLimits(*limits, **more)) as served:
        served.http.close()  # what it keeps alive would be one of the few connections
        yield served


def dropped(served: Served) -> dict[str, float]:
    """Counts that are not zero, by reason. Asked for on a connection that is closed at once."""
    text = httpx.get(f"{served.url}/metrics").text
    lines = [line.split() for line in text.splitlines() if line.startswith("hybridkv_connections_")]
    counts = {name: float(value) for name, value in lines if "{" in name}
    return {name.split('"')[1]: count for name, count in counts.items() if count}


@contextmanager
def few_files(checkpoint: Path, files: int) -> Iterator[subprocess.Popen[str]]:
    """`hybridkv serve` in a shell with `ulimit -n`."""
    command = [sys.executable, "-c", "from hybridkv.cli import main; main()", "serve", str(checkpoint)]
    options = ["--memory", "16MiB", "--device", "cpu", "--port", "0"]
    process = subprocess.Popen(
        ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_400_half_open_connections_and_256_files(checkpoint: Path) -> None:
    """`/health` answers while they come and afterwards, a stream comes to its end, and the log stays short."""
    with few_files(checkpoint, 256) as process, ExitStack() as stack:
        assert process.stdout is not None
        url = next(line.split()[2] for line in process.stdout if line.startswith("Serving at "))
        body = {"prompt": [5, 6], "max_tokens": 400, "stream": True, "ignore_eos": True}
        stream = stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S))
        lines = stream.iter_lines()
        next(lines)
        for number in range(400):
            stack.enter_context(connect(url, HALF))
            if number % 40 == 0:
                check_health(url)
        for _ in range(5):
            check_health(url)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        metrics = httpx.get(f"{url}/metrics").text
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
    counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("hybridkv_connections"))
    limit = float(counts["hybridkv_connections_limit"])
    assert 64 <= limit <= 192
    assert float(counts['hybridkv_connections_dropped_total{reason="head"}']) >= 400 - limit
    assert float(counts['hybridkv_connections_refused_total{reason="files"}']) == 0
    assert f"at most {limit:.0f} connections at once: this process may open 256 files" in log
    told = [line for line in log.splitlines() if "connections were refused or dropped" in line]
    assert len(told) == 1 or len(told) == 2
    assert "dropped_head=" in told[0]
    assert len(log) < 5000


# --- room for a new connection ----------------------------------------------------------------------------------------


@pytest.fixture
def running(engine: Engine, pace: Pace) -> Any:
    """Sends a request that runs until the engine walks on."""

    def send(served: Served) -> Client:
        client = Client(served, prompt=prompt(5, 1), max_tokens=2, stream=True)
        assert eventually(lambda: pace.num_waiting + len(engine._core.scheduler.running) > 0)
        return client

    return send


def test_idle_ones_go_first_then_half_open_ones_and_running_ones_never(
    engine: Engine, pace: Pace, running: Any
) -> None:
    with limited(engine, 4, 4) as served, ExitStack() as stack:

        def enter(sent: bytes) -> socket.socket:
            client = stack.enter_context(connect(served.url, sent))
            if sent == WHOLE:
                read_reply(client, 200)
            return client

        stream = running(served)
        half, silent, idle = enter(HALF), enter(b""), enter(WHOLE)
        second_idle = enter(WHOLE)
        assert [is_closed(one) for one in (idle, half, silent)] == [True, False, False]
        enter(HALF)
        assert eventually(lambda: is_closed(second_idle))
        enter(HALF)
        assert eventually(lambda: is_closed(half))
        assert not is_closed(silent)
        silent.sendall(WHOLE)
        read_reply(silent, 200)
        pace.run()
        received = b""
        while b"[DONE]" not in received:
            received += stream.read()
        assert dropped(served) == {"idle": 3, "head": 1}  # one of them for this question


def test_where_all_run_others_are_refused(engine: Engine, pace: Pace, running: Any) -> None:
    with limited(engine, 1) as served:
        stream = running(served)
        with connect(served.url, WHOLE) as refused:
            message = error_on(refused, 503)
        assert message == "there are too many connections, at most 1: try again later"
        stream.vanish()
        pace.run()
        assert eventually(lambda: dropped(served).get("full", 0) >= 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback network has one address")
def test_one_address_shuts_no_other_out(engine: Engine, running: Any) -> None:
    with limited(engine, 3, 1) as served:
        stream = running(served)
        with connect(served.url, WHOLE) as refused:
            assert "a larger --max-connections-per-address" in error_on(refused, 503)
        with connect(served.url, WHOLE, source="127.0.0.2") as other:
            read_reply(other, 200)
        stream.vanish()


def test_a_body_that_has_stalled_makes_room_and_one_that_comes_does_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridkv.serve.connections._STALLED_S", 2 * PATIENCE_S)
    stages, move = list[Stage](), Connections.move

    def seen(self: Connections, connection: Any, stage: Stage) -> None:
        move(self, connection, stage)
        stages.append(stage)

    monkeypatch.setattr(Connections, "move", seen)
    with limited(engine, 1) as served, ExitStack() as stack:
        upload = stack.enter_context(connect(served.url, POST.format(100).encode() + b"{"))
        assert eventually(lambda: Stage.BODY in stages)  # until then it may be dropped
        with connect(served.url, WHOLE) as refused:
            assert "too many connections" in error_on(refused, 503)
        assert not is_closed(upload)
        monkeypatch.setattr("hybridkv.serve.connections._STALLED_S", 0.0)
        check_health(served.url)
        assert eventually(lambda: is_closed(upload))
        assert dropped(served)["body"] == 1


def test_a_reply_that_is_on_its_way_is_not_cut(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serve.serving.Server", NarrowServer)
    with limited(engine, 1) as served, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE_S)
        slow.connect(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
        slow.sendall(WHOLE.replace(b"/health", b"/openapi.json"))
        assert select([slow], [], [], PATIENCE_S)[0]
        with connect(served.url, WHOLE) as refused:
            assert "too many connections" in error_on(refused, 503)
        assert "paths" in read_reply(slow, 200)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux disconnects such clients")
def test_a_client_that_does_not_read_is_disconnected(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serve.serving.Server", NarrowServer)
    monkeypatch.setattr("hybridkv.serve.uvicorn_seam._UNREAD_S", 1)
    with limited(engine, 1) as served, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
        slow.sendall(WHOLE.replace(b"/health", b"/openapi.json") * 50)

        def is_let_in() -> bool:
            with connect(served.url, WHOLE) as other:
                return b"200 OK" in other.recv(65536)

        assert eventually(is_let_in)


# --- time limits ------------------------------------------------------------------------------------------------------


def trickle(connection: socket.socket, data: bytes) -> None:
    """Send a byte at a time until the server answers or hangs up."""
    for place in range(len(data)):
        connection.sendall(data[place : place + 1])
        if select([connection], [], [], 0.05)[0]:
            return
    raise AssertionError("no answer")


def test_heads_that_take_too_long(engine: Engine) -> None:
    """The first one and a later one; time counts from the first byte, not from the latest one."""
    with limited(engine, receive_timeout_s=0.5) as served:
        with connect(served.url) as silent, connect(served.url) as first, connect(served.url, WHOLE) as later:
            read_reply(later, 200)
            for connection in (first, later):
                trickle(connection, HALF + b"X: " + b"x" * 200)
                assert (
                    error_on(connection, 408) == "the head of the request has not arrived within 0.5 s: send it again"
                )
            assert rest_of(silent) == b""
        assert dropped(served) == {"slow_head": 2}


def test_bodies_that_take_too_long(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """With many small pauses, or with a long one after much has come."""
    caplog.set_level(logging.INFO, "hybridkv.serve")
    head = POST.format(100_000).encode()
    with limited(engine, receive_timeout_s=0.5) as served:
        with connect(served.url, head) as slow, connect(served.url, head + b" " * 90_000) as stalled:
            trickle(slow, b" " * 200)
            assert "1024 bytes/s, or start the server with a larger --receive-timeout" in error_on(slow, 408)
            message = error_on(stalled, 408)
            assert message.startswith("the body comes too slowly, 90000 bytes so far: send it without pauses of 0.5 s")
        assert dropped(served) == {"slow_body": 2}
    facts = [record.__dict__["facts"] for record in caplog.records if record.msg == "request"]
    assert [(one["status"], one["outcome"]) for one in facts] == [(408, "refused")] * 2


def test_a_large_body_may_take_its_time(engine: Engine) -> None:
    """Four times the limit, with pauses of a tenth of it."""
    content = json.dumps({"prompt": [5], "max_tokens": 1, "other": "x" * 40_000}).encode()
    with limited(engine, receive_timeout_s=0.5) as served:
        with connect(served.url, POST.format(len(content)).encode()) as upload:
            for place in range(0, len(content), 1000):
                upload.sendall(content[place : place + 1000])
                time.sleep(0.05)
            read_reply(upload, 200)
        assert dropped(served) == {}


def test_the_rest_of_a_body_that_has_its_answer(engine: Engine) -> None:
    """It neither keeps the connection for ever, nor gets a second answer."""
    with limited(engine, receive_timeout_s=0.5) as served:
        with connect(served.url, POST.format(1000).replace("completions", "nothing").encode()) as upload:
            read_reply(upload, 404)
            trickle(upload, b" " * 200)
            with suppress(ConnectionResetError):
                assert upload.recv(65536) == b""
        assert dropped(served) == {}


def test_a_reply_that_has_begun_waits_for_no_body(engine: Engine) -> None:
    events = b"GET /v1/hybridkv/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
    with limited(engine, receive_timeout_s=0.3) as served, connect(served.url, events) as watcher:
        assert watcher.recv(65536).startswith(b"HTTP/1.1 200")
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert not select([watcher], [], [], 0.05)[0] or watcher.recv(65536)


# --- the log, and file descriptors ------------------------------------------------------------------------------------


def test_one_line_a_minute(engine: Engine, running: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hybridkv.serve")

    def told() -> list[dict[str, Any]]:
        return [one.__dict__["facts"] for one in caplog.records if "refused or dropped" in one.message]

    with limited(engine, 1) as served:
        stream = running(served)
        with connect(served.url) as first:
            rest_of(first)
        assert eventually(lambda: len(told()) == 1)
        for _ in range(3):
            with connect(served.url) as later:
                rest_of(later)
        time.sleep(1.5)  # more than a sweep
        assert told() == [{"refused_full": 1, "open": 1, "limit": 1}]
        stream.vanish()
    assert told()[1:] == [{"refused_full": 3, "open": 0, "limit": 1}]


@pytest.mark.parametrize(("limits", "files_each", "expected"), [
    (ConnectionLimits(), 1, (16384, 12288)),
    (ConnectionLimits(max_per_address=20000), 1, (16384, 16384)),
    (ConnectionLimits(100, 7), 1, (100, 7)),
    (ConnectionLimits(1), 1, (1, 1)),
])  # fmt: skip
def test_limits_with_many_files(
    limits: ConnectionLimits, files_each: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert room_for(limits, files_each) == expected
    assert not caplog.records


@pytest.mark.parametrize(("files", "limits", "files_each", "least", "most"), [
    (1024, ConnectionLimits(10_000), 1, 512, 896),
    (1024, ConnectionLimits(), 3, 170, 299),
    (10_000, ConnectionLimits(9_900), 1, 8000, 8976),
    (32, ConnectionLimits(), 1, 8, 8),
])  # fmt: skip
def test_limits_with_few_files_are_told(
    files: int, limits: ConnectionLimits, files_each: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """An eighth is kept, 64 to 1024, and what is open already."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    room = room_for(limits, files_each)
    assert least <= room.connections <= most
    assert f"at most {room.connections} connections at once: this process may open {files} files" in caplog.text


@pytest.mark.parametrize(("host", "peer"), [
    ("10.0.0.1", "10.0.0.1"),
    ("::ffff:10.0.0.1", "10.0.0.1"),
    ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    ("fe80::1%eth0", "fe80::/64"),
])  # fmt: skip
def test_addresses_that_count_as_one(host: str, peer: str) -> None:
    assert peer_of(host) == peer


def test_limits_that_let_no_one_in() -> None:
    for wrong in ((0,), (None, 0), (None, None, 0), (None, None, float("inf"))):
        with pytest.raises(InputError, match=r"at least 1 client|choose a number above 0"):
            ConnectionLimits(*wrong)


class OneFile(socket.socket):
    """A listening socket of a process that has a file descriptor for one connection."""

    def accept(self) -> tuple[socket.socket, Any]:
        if any(one.fileno() >= 0 for one in self.opened):
            raise OSError(errno.EMFILE, "Too many open files")  # even if no connection waits
        connection, address = super().accept()
        self.opened.append(connection)
        return connection, address

    opened: list[socket.socket]


class ServerWithOneFile(Server):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._socket = OneFile(fileno=self._socket.detach())
        self._socket.opened = []


def test_without_a_file_descriptor_an_idle_connection_makes_room(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("tests.serve.serving.Server", ServerWithOneFile)
    with limited(engine) as served, connect(served.url, WHOLE) as idle:
        read_reply(idle, 200)
        check_health(served.url)
        assert is_closed(idle)
    [line] = [record.__dict__["facts"] for record in caplog.records]
    assert (line["refused_files"], line["dropped_idle"]) == (1, 1)


def test_without_a_file_descriptor_for_long_nothing_spins(
    engine: Engine, pace: Pace, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.serve.serving.Server", ServerWithOneFile)
    with limited(engine) as served:
        stream = running(served)
        with connect(served.url, WHOLE) as waiting:
            assert not select([waiting], [], [], 0.5)[0]
            stream.vanish()
            read_reply(waiting, 200)
        pace.run()
        assert 1 <= dropped(served)["files"] <= 20
