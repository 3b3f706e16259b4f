"""Control messages between engines: only a peer with the secret gets or says anything, each message once."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hybridkv.errors import InputError
from hybridkv.link import control
from hybridkv.link.control_client import ControlClient
from hybridkv.link.control_server import ControlServer
from hybridkv.link.errors import LinkError, PeerDown, PeerSilent, PeerUnproven, Refused
from hybridkv.link.secret import SECRET_VARIABLE, Secret, read_secret
from tests.patience import Stopwatch

SECRET = Secret("0123456789abcdef0123456789abcdef")
OTHER = Secret("another secret that is long enough")
PATIENCE_S = 20.0


class Peer:
    """A handler that records the calls it executes."""

    def __init__(self) -> None:
        self.executed: list[int] = []
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, method: str, params: dict[str, Any], session: str) -> dict[str, Any]:
        assert control.is_nonce(session)
        if method == "echo":
            self.executed.append(params.get("x", 0))
            return {"method": method, **params}
        if method == "wait":
            self.entered.set()
            self.go_on.wait(PATIENCE_S)
            return {}
        if method == "refuse":
            raise Refused("the pages were freed: send the prompt again", kind="gone")
        if method == "not json":
            return {"x": object()}
        if method == "huge":
            return {"x": "x" * params["bytes"]}
        raise KeyError("a detail that stays here")


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def server(peer: Peer) -> Iterator[ControlServer]:
    with ControlServer("127.0.0.1", 0, SECRET, peer) as server:
        yield server
        peer.go_on.set()


@pytest.fixture
def client(server: ControlServer) -> Iterator[ControlClient]:
    with ControlClient(server.url, SECRET, timeout_s=PATIENCE_S) as client:
        yield client


class Recorder:
    """A proxy that keeps what passes, and may change it: `change(is_from_client, data)`. Nothing: it hangs up."""

    def __init__(self, port: int, change: Callable[[bool, bytes], bytes] = lambda _, data: data) -> None:
        self._to = port
        self._change = change
        self.sent: list[bytes] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._to))
            for source, sink, is_from_client in ((here, there, True), (there, here, False)):
                threading.Thread(target=self._copy, args=(source, sink, is_from_client), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, is_from_client: bool) -> None:
        try:
            while data := self._change(is_from_client, source.recv(2**20)):
                if is_from_client:
                    self.sent.append(data)
                sink.sendall(data)
            for one in (source, sink):
                one.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


@contextmanager
def between(server: ControlServer, change: Callable[[bool, bytes], bytes] = lambda _, data: data) -> Iterator[Recorder]:
    recorder = Recorder(server.port, change)
    try:
        yield recorder
    finally:
        recorder.close()


def send_raw(port: int, data: bytes) -> tuple[int, dict[str, Any]]:
    """The status and JSON of the reply to bytes on a new connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        head, body = b"", b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(2**16)
        head, _, body = head.partition(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(body) < size:
            body += connection.recv(2**16)
    return int(head.split()[1]), json.loads(body)


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = "\r\n".join((f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""))
    return head.encode() + body


# --- the secret -------------------------------------------------------------------------------------------------------


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    from_file = read_secret(tmp_path / "secret")
    monkeypatch.setenv(SECRET_VARIABLE, "0123456789abcdef")
    assert read_secret(None).mac("x") == from_file.mac("x") != SECRET.mac("x")


def test_a_bad_secret_is_refused_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(InputError, match="openssl rand -hex 32"):
        read_secret(None)
    monkeypatch.setenv(SECRET_VARIABLE, "hunter2")
    with pytest.raises(InputError, match=r"7 characters.*openssl rand -hex 32") as caught:
        read_secret(None)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InputError, match="No such file"):
        read_secret(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff" * 32)
    with pytest.raises(InputError, match="no text in UTF-8"):
        read_secret(tmp_path / "bytes")


def test_a_secret_shows_itself_nowhere() -> None:
    assert "0123" not in f"{SECRET!r} {SECRET}"
    with pytest.raises(TypeError):
        pickle.dumps(SECRET)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_returns_what_the_handler_returns(client: ControlClient) -> None:
    for x in range(3):
        assert client.call("echo", {"x": x, "text": "äöü"}) == {"method": "echo", "x": x, "text": "äöü"}


def test_a_refusal_reaches_the_caller(client: ControlClient) -> None:
    with pytest.raises(Refused, match="the pages were freed") as caught:
        client.call("refuse", {})
    assert caught.value.kind == "gone"
    assert client.call("echo", {}) == {"method": "echo"}


@pytest.mark.parametrize("method", ["unknown", "not json"])
def test_a_failed_handler_reveals_nothing(client: ControlClient, method: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LinkError, match="failed") as caught:
        client.call(method, {})
    assert "detail" not in str(caught.value)
    assert method in caplog.text
    assert client.call("echo", {}) == {"method": "echo"}


def test_a_big_body_passes_and_a_bigger_one_does_not(server: ControlServer, client: ControlClient) -> None:
    text = "x" * (control.MAX_BODY_BYTES - 100)
    assert client.call("echo", {"x": text})["x"] == text
    with pytest.raises(InputError, match="16777216"):
        client.call("echo", {"x": text + "x" * 100})
    with pytest.raises(LinkError, match="too large"):
        client.call("huge", {"bytes": control.MAX_BODY_BYTES})
    status, _ = send_raw(server.port, b"POST /hello HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n")
    assert status == 413


def test_many_threads_call_at_once(server: ControlServer, peer: Peer, client: ControlClient) -> None:
    wrong: list[Any] = []

    def work(thread: int) -> None:
        for i in range(100):
            x = thread * 100 + i
            if client.call("echo", {"x": x})["x"] != x:
                wrong.append(x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(peer.executed) == list(range(800))
    assert not wrong
    assert server.refusals == {}


def test_ipv6(peer: Peer) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with ControlServer("::1", 0, SECRET, peer) as server, ControlClient(server.url, SECRET) as client:
        assert server.url == f"http://[::1]:{server.port}"
        assert client.call("echo", {}) == {"method": "echo"}


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "https://x:1", "http://x", "http://:1", "http://x:1/path", "http://x:y"]
)
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="http://HOST:PORT"):
        ControlClient(url, SECRET)


def test_an_address_in_use_is_refused(server: ControlServer, peer: Peer) -> None:
    with pytest.raises(InputError, match=f"port {server.port}: "):
        ControlServer("127.0.0.1", server.port, SECRET, peer)


# --- attackers --------------------------------------------------------------------------------------------------------


def test_a_client_with_another_secret_says_nothing_but_hello(server: ControlServer, peer: Peer) -> None:
    with between(server) as recorder, ControlClient(recorder.url, OTHER) as client:
        with pytest.raises(PeerUnproven, match="same secret"):
            client.call("echo", {"x": 1})
        assert len(b"".join(recorder.sent).split(b"POST ")) == 2
        assert b"echo" not in b"".join(recorder.sent)
    assert peer.executed == []


def test_a_server_with_another_secret_gets_nothing_but_hello(peer: Peer) -> None:
    with ControlServer("127.0.0.1", 0, OTHER, peer) as fake, between(fake) as recorder:
        with pytest.raises(PeerUnproven), ControlClient(recorder.url, SECRET) as client:
            client.call("echo", {"key": "to all memory"})
        sent = b"".join(recorder.sent)
    assert sent.startswith(b"POST /hello")
    assert b"memory" not in sent


def test_a_call_without_proof_is_not_executed(server: ControlServer, peer: Peer) -> None:
    hello = control.to_json({"version": 1, "nonce": "a" * 64})
    _, reply = send_raw(server.port, post("/hello", hello))
    body = control.to_json({"method": "echo", "params": {}})
    session = f"{control.SESSION_HEADER}: {reply['nonce']}"
    guessed = f"{control.MAC_HEADER}: {control.call_mac(b'guess', reply['nonce'], 1, body)}"
    for headers in [
        (),
        (session, "X-Link-Number: 1"),
        (session, "X-Link-Number: 1", guessed),
        (session, "X-Link-Number: -1"),
    ]:
        assert send_raw(server.port, post("/call", body, *headers)) == (401, {"error": "unproven"})
    assert server.refusals == {"unproven": 4}
    assert peer.executed == []


def test_a_replayed_call_is_not_executed(server: ControlServer, peer: Peer) -> None:
    with between(server) as recorder, ControlClient(recorder.url, SECRET) as client:
        client.call("echo", {"x": 1})
        client.call("echo", {"x": 2})
        calls = [b"POST /call" + part for part in b"".join(recorder.sent).split(b"POST /call")[1:]]
    for call in calls:
        assert send_raw(server.port, call) == (401, {"error": "replayed"})
    assert peer.executed == [1, 2]
    assert server.refusals == {"replayed": 2}


def test_a_changed_call_is_not_executed(server: ControlServer, peer: Peer) -> None:
    def change(is_from_client: bool, data: bytes) -> bytes:
        return data.replace(b'"x":1', b'"x":9')

    with between(server, change) as recorder, pytest.raises(PeerUnproven, match="changed on its way"):
        ControlClient(recorder.url, SECRET).call("echo", {"x": 1})
    assert peer.executed == []
    assert server.refusals == {"unproven": 1}


@pytest.mark.parametrize("change", [
    lambda data: data.replace(b'"x":1', b'"x":9'),
    lambda data: data.replace(b"result", b"failed"),
    lambda data: data.replace(control.MAC_HEADER.encode(), b"X-Else"),
])  # fmt: skip
def test_a_changed_reply_is_not_believed(server: ControlServer, change: Callable[[bytes], bytes]) -> None:
    def change_reply(is_from_client: bool, data: bytes) -> bytes:
        return data if is_from_client else change(data)

    with between(server, change_reply) as recorder, pytest.raises(PeerUnproven):
        ControlClient(recorder.url, SECRET).call("echo", {"x": 1})


def test_a_reply_to_another_call_is_not_believed(server: ControlServer) -> None:
    """A man in the middle keeps the first reply and sends it again as the second."""
    replies: list[bytes] = []

    def repeat(is_from_client: bool, data: bytes) -> bytes:
        if is_from_client or b"result" not in data:
            return data
        replies.append(data)
        return replies[0]

    with between(server, repeat) as recorder, ControlClient(recorder.url, SECRET) as client:
        assert client.call("echo", {"x": 1})["x"] == 1
        with pytest.raises(PeerUnproven):
            client.call("echo", {"x": 2})


def test_nobody_else_can_make_a_client_repeat_a_call(server: ControlServer, peer: Peer) -> None:
    """A man in the middle answers an executed call with "unknown session", without the secret."""
    body = b'{"error":"unknown session","proof":"' + b"0" * 64 + b'"}'
    forged = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def forge(is_from_client: bool, data: bytes) -> bytes:
        return forged if not is_from_client and b"result" in data else data

    with between(server, forge) as recorder, pytest.raises(PeerUnproven):
        ControlClient(recorder.url, SECRET).call("echo", {"x": 1})
    assert peer.executed == [1]


def test_hellos_of_others_drop_no_proven_session(peer: Peer) -> None:
    with ControlServer("127.0.0.1", 0, SECRET, peer, max_sessions=4) as server:
        with ControlClient(server.url, SECRET) as client:
            client.call("echo", {})
            for _ in range(10):
                send_raw(server.port, post("/hello", control.to_json({"version": 1, "nonce": "b" * 64})))
            assert len(server._exchange.sessions) == 5
            client.call("echo", {})
        assert server.refusals == {}


@pytest.mark.parametrize(("data", "status"), [
    (post("/hello", b"{"), 400),
    (post("/hello", b"[" * 4000), 400),
    (post("/hello", b"[]"), 400),
    (post("/hello", b'{"version":1,"nonce":"\\u0000"}'), 400),
    (post("/hello", b'{"version":1}'), 400),
    (post("/else", b"{}"), 404),
    (b"GET /hello HTTP/1.1\r\n\r\n", 404),
    (b"BREW /hello HTTP/1.1\r\n\r\n", 404),
    (b"POST /hello HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
    (b"POST /call HTTP/1.1\r\n\r\n", 411),
    (b"nonsense\r\n\r\n", 400),
    (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", 414),
])  # fmt: skip
def test_what_is_no_message_is_refused(server: ControlServer, data: bytes, status: int) -> None:
    assert send_raw(server.port, data)[0] == status


def test_another_version_is_refused_by_both_sides(server: ControlServer) -> None:
    def later(is_from_client: bool, data: bytes) -> bytes:
        return data if is_from_client else data.replace(b'"version":1', b'"version":7')

    assert send_raw(server.port, post("/hello", b'{"version":2,"nonce":"x"}')) == (
        400,
        {"error": "version", "version": 1},
    )
    with between(server, later) as recorder, pytest.raises(LinkError, match=r"version 7 .* version 1:"):
        ControlClient(recorder.url, SECRET).call("echo", {})


# --- peers that go, hang or are slow ----------------------------------------------------------------------------------


def test_a_client_says_hello_again_after_a_restart(peer: Peer) -> None:
    first = ControlServer("127.0.0.1", 0, SECRET, peer)
    with ControlClient(first.url, SECRET) as client:
        client.call("echo", {"x": 1})
        first.close()
        with pytest.raises(PeerDown, match="check that its process runs"):
            client.call("echo", {"x": 2})
        with ControlServer("127.0.0.1", first.port, SECRET, peer):
            client.call("echo", {"x": 3})
    assert peer.executed == [1, 3]


def test_a_kept_connection_survives_a_restart(peer: Peer) -> None:
    """The client finds its connection closed, its session unknown, and the call is executed once."""
    first = ControlServer("127.0.0.1", 0, SECRET, peer)
    with ControlClient(first.url, SECRET) as client:
        client.call("echo", {"x": 1})
        first.close()
        with ControlServer("127.0.0.1", first.port, SECRET, peer) as second:
            client.call("echo", {"x": 2, "big": "x" * 2**21})
            assert second.refusals == {"unknown session": 1}
    assert peer.executed == [1, 2]


def test_an_idle_session_expires(peer: Peer) -> None:
    with ControlServer("127.0.0.1", 0, SECRET, peer, session_idle_s=0.05) as server:
        with ControlClient(server.url, SECRET) as client:
            client.call("echo", {})
            time.sleep(0.1)
            client.call("echo", {})
        assert server.refusals == {"unknown session": 1}


def test_a_closed_connection_is_opened_again(peer: Peer) -> None:
    with ControlServer("127.0.0.1", 0, SECRET, peer, connection_idle_s=0.05) as server:
        with ControlClient(server.url, SECRET) as client:
            client.call("echo", {"x": 1})
            time.sleep(0.2)
            client.call("echo", {"x": 2})
        assert server.refusals == {}
    assert peer.executed == [1, 2]


def test_a_call_that_was_executed_is_not_repeated(server: ControlServer, peer: Peer) -> None:
    """The connection is cut after the call was executed: the repetition is refused, and the caller knows."""

    def cut(is_from_client: bool, data: bytes) -> bytes:
        return b"" if not is_from_client and b'"x":2' in data else data

    with between(server, cut) as recorder, ControlClient(recorder.url, SECRET) as client:
        client.call("echo", {"x": 1})
        with pytest.raises(PeerDown, match="may have executed"):
            client.call("echo", {"x": 2})
        client.call("echo", {"x": 3})
    assert peer.executed == [1, 2, 3]


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with pytest.raises(PeerDown, match=f"{port}.*check that its process runs"):
        ControlClient(f"http://127.0.0.1:{port}", SECRET).call("echo", {})


def test_a_silent_peer(server: ControlServer, peer: Peer, client: ControlClient) -> None:
    start = time.monotonic()
    with pytest.raises(PeerSilent, match="has not answered in time"):
        client.call("wait", {}, timeout_s=0.2)
    assert 0.15 < time.monotonic() - start < 5
    assert client.call("echo", {}) == {"method": "echo"}
    with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(PeerSilent):
        ControlClient(f"http://127.0.0.1:{deaf.getsockname()[1]}", SECRET, timeout_s=0.1).call("echo", {})


def test_slow_connections_block_nobody_and_end(peer: Peer) -> None:
    """They trickle: each byte comes in time, and the whole does not."""
    with ControlServer("127.0.0.1", 0, SECRET, peer, max_connections=3, request_s=0.5) as server:
        slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        with ControlClient(server.url, SECRET) as client:
            ended: list[int] = []
            end = time.monotonic() + PATIENCE_S
            while len(ended) < 2 and time.monotonic() < end:
                for one in slow:
                    try:
                        one.send(b"x")
                    except OSError:
                        ended.append(1)
                start = Stopwatch()
                client.call("echo", {})
                assert start.seconds < 0.5
                time.sleep(0.05)
            assert len(ended) >= 2
        for one in slow:
            one.close()


def test_more_connections_than_allowed(peer: Peer) -> None:
    with ControlServer("127.0.0.1", 0, SECRET, peer, max_connections=2) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        with ControlClient(server.url, SECRET) as client:
            with pytest.raises(PeerDown):
                client.call("echo", {})
            idle[0].close()
            assert _eventually(lambda: client.call("echo", {}) == {"method": "echo"})
        idle[1].close()


def _eventually(works: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            return works()
        except PeerDown:
            time.sleep(0.01)
    return False


def test_close_while_a_call_is_in_progress(peer: Peer) -> None:
    server = ControlServer("127.0.0.1", 0, SECRET, peer)
    caught: list[BaseException] = []

    def call() -> None:
        try:
            ControlClient(server.url, SECRET).call("wait", {}, timeout_s=PATIENCE_S)
        except PeerDown as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert peer.entered.wait(PATIENCE_S)
    start = Stopwatch()
    server.close(timeout_s=0.2)
    assert start.seconds < 2
    caller.join(PATIENCE_S)
    assert len(caught) == 1
    peer.go_on.set()


def test_close_leaves_no_threads(peer: Peer) -> None:
    before = set(threading.enumerate())
    server = ControlServer("127.0.0.1", 0, SECRET, peer)
    client = ControlClient(server.url, SECRET)
    client.call("echo", {})
    server.close()
    server.close()
    assert set(threading.enumerate()) <= before
    client.close()
    with pytest.raises(LinkError, match="closed"):
        client.call("echo", {})
