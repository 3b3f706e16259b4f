"""A server in a thread of the test process, so that tests can look at its engine; an engine that walks step by step."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from hybridkv import Engine
from hybridkv.engine.results import Update
from hybridkv.serve import ServeOptions, Server, make_app
from hybridkv.serve.inspection_replies import RecordReply

MODEL = "tiny"
PATIENCE_S = 60.0
LONG = 400
TLS = httpx.create_ssl_context()
"""For all clients: each would read the certificates of all authorities, and no server here has one."""


class Served:
    """A server and its engine."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine = engine
        self.url = url
        self.client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=openai.DefaultHttpxClient(verify=TLS)
        )
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, verify=TLS)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metrics(self) -> dict[str, float]:
        """All samples, by name and labels as Prometheus writes them."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            one.name + "".join(f"|{value}" for _, value in sorted(one.labels.items())): one.value
            for family in families
            for one in family.samples
        }


@contextmanager
def serving(
    engine: Engine, served_model_name: str = MODEL, *, shutdown_timeout: int = 5, **options: Any
) -> Iterator[Served]:
    server, ready = Server("127.0.0.1", 0), threading.Event()
    app = make_app(engine, ServeOptions(served_model_name, **{"is_local": server.is_local, **options}))
    thread = threading.Thread(target=lambda: server.run(app, shutdown_timeout=shutdown_timeout, on_ready=ready.set))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield Served(engine, server.url)
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class Client:
    """A connection that has sent a request for a long reply."""

    def __init__(
        self, served: Served, *, path: str = "/v1/completions", headers: Mapping[str, str] | None = None, **body: Any
    ) -> None:
        port = int(served.url.split(":")[-1])
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        sent = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True, **body}
        content = json.dumps(sent).encode()
        sends = {
            "Host": "127.0.0.1",
            "Content-Type": "application/json",
            "Content-Length": len(content),
            **(headers or {}),
        }
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sends.items()), "", ""]
        self._socket.sendall("\r\n".join(lines).encode() + content)

    def read(self, size: int = 65536) -> bytes:
        return self._socket.recv(size)

    def read_all(self) -> bytes:
        """Until the server hangs up."""
        with self._socket:
            return b"".join(iter(self.read, b""))

    def vanish(self) -> None:
        self._socket.close()


def error_of(response: httpx.Response, status: int) -> Any:
    """The error, which has all fields that OpenAI's have."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes true before patience ends."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def record(served: Served, name: str, *, prompts: int = 1) -> dict[str, Any]:
    """A record as soon as it is whole: the reply may be a moment earlier."""
    found: dict[str, Any] = {}

    def is_whole() -> bool:
        found.update(served.http.get(f"/v1/hybridkv/requests/{name}").json())
        return found["outcome"] != "running" and None not in found["prompts"]

    assert eventually(is_whole)
    RecordReply.model_validate_json(json.dumps(found), strict=True)
    assert len(found["prompts"]) == prompts
    for one in found["prompts"]:
        ends = [0, *(span["end"] for span in one["spans"])]
        assert [span["start"] for span in one["spans"]] == ends[:-1]
        assert ends[-1] == one["prompt_tokens"]
    return found


def check_idle(served: Served) -> None:
    """Nothing runs, waits or is held, the books are right, and a reset gives every page back."""
    engine = served.engine
    assert eventually(lambda: not engine._core.has_work)
    assert eventually(lambda: served.metrics()["hybridkv_server_waiting_samples"] == 0)
    assert all(lease.is_pin for lease in engine._core.cache.leases)
    engine.check_integrity()
    engine.reset_cache()
    assert not any(engine.stats().memory.used_bytes.values())


class Pace:
    """An engine that takes steps only when told to. What others ask of it happens between steps, as ever."""

    def __init__(self, engine: Engine) -> None:
        self.core = engine._core
        self._calls = engine._loop._calls
        self._step = engine._core.step
        self._permits = threading.Semaphore(0)
        self._at_door = threading.Event()
        self._is_free = False

    @property
    def num_asked(self) -> int:
        """Things that others asked of the engine since its last step: requests, or their ends."""
        return len(self._calls)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and on their way there."""
        return len(self.core.scheduler.waiting) + self.num_asked

    def step(self) -> list[Update]:
        if not self._is_free:
            self._at_door.set()
            self._permits.acquire()
        return self._step()

    def advance(self, steps: int = 1) -> None:
        """So many steps; returns when they are done and the next one is about to begin."""
        for _ in range(steps):
            self.wait()
            self._at_door.clear()
            self._permits.release()
        assert eventually(lambda: self._at_door.is_set() or not self.core.has_work)

    def wait(self) -> None:
        """Until a step is about to begin."""
        assert self._at_door.wait(PATIENCE_S)

    def run(self) -> None:
        """On its own again."""
        self._is_free = True
        self._permits.release()
