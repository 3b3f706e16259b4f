"""What is wrong is told in OpenAI's form, with the right status, and by name; and the server lives on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from hybridkv import Engine
from tests.engine.zoo import fresh, prompt
from tests.serve.serving import MODEL, Pace, Served, check_idle, error_of, eventually, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
FAILING = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


# --- limits and keys --------------------------------------------------------------------------------------------------


def test_a_full_queue_sends_clients_away(engine: Engine, pace: Pace) -> None:
    with serving(engine, max_waiting=3) as served, ThreadPoolExecutor(3) as others:
        waiting = [others.submit(served.post, COMPLETIONS, prompt=prompt(20, i), max_tokens=2) for i in range(3)]
        assert eventually(lambda: pace.num_waiting == 3)
        response = served.post(COMPLETIONS, prompt="x")
        error = error_of(response, 429)
        assert (error["type"], response.headers["retry-after"]) == ("rate_limit_error", "1")
        assert "3 samples are waiting" in error["message"]
        pace.run()
        assert [one.result().status_code for one in waiting] == [200] * 3
        assert served.metrics()["hybridkv_requests_total|busy"] == 1
        check_idle(served)


def test_keys_open_everything_but_what_machines_watch(engine: Engine) -> None:
    with serving(engine, api_keys=("first-key", "second-key")) as served:

        def status(path: str, *values: bytes) -> int:
            return served.http.get(path, headers=[(b"Authorization", value) for value in values]).status_code

        assert "'Authorization: Bearer KEY'" in error_of(served.http.get("/v1/models"), 401)["message"]
        assert [status("/v1/models", b"Bearer first-key"), status("/v1/models", b"bearer second-key")] == [200, 200]
        wrong = (b"", b"Bearer", b"Bearer first", b"Basic first-key", b"first-key", b"Bearer first-key x")
        odd = (b"Bearer \xff\xfe", "Bearer ключ".encode(), b"\xff")
        assert {status("/v1/models", value) for value in (*wrong, *odd)} == {401}
        assert [status(path) for path in ("/health", "/metrics")] == [200, 200]
        assert [status(path) for path in ("/docs", "/openapi.json", "/nothing", "/health/")] == [401] * 4
        assert served.http.post("/admin/cache/reset").status_code == 401
        assert served.http.post(COMPLETIONS, content=b"x" * 2**21).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            served.client.completions.create(model=MODEL, prompt="x")


def test_a_clients_request_id_comes_back_if_it_can_stand_in_a_log(served: Served) -> None:
    def returned(value: bytes) -> str:
        response = served.http.get("/health", headers=[(b"X-Request-Id", value)])
        return str(response.headers["x-request-id"])

    assert returned(b"my-request") == "my-request"
    assert returned(b"x" * 129) != "x" * 129
    assert returned("größe".encode()).isascii()


# --- an engine in trouble ---------------------------------------------------------------------------------------------


def test_a_model_that_fails_fails_its_requests_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: Any) -> Any:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(served.engine._core.runner, "run", broken)
        error = error_of(served.post(COMPLETIONS, prompt="x"), 500)
        assert (error["message"], error["type"]) == ("the model failed: RuntimeError: no such kernel", "server_error")
        with pytest.raises(openai.APIError, match="no such kernel"):
            list(served.client.completions.create(model=MODEL, prompt=["x", "y"], stream=True))
    assert served.post(COMPLETIONS, prompt="x").status_code == 200


def test_a_bug_is_answered_too(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    for name in ("prepare", "check", "_submission"):
        with monkeypatch.context() as patch:
            patch.setattr(served.engine, name, broken)
            error = error_of(served.post(COMPLETIONS, prompt="x"), 500)
            assert "an error in the server" in error["message"]
            assert "secret" not in error["message"]
    assert served.post(COMPLETIONS, prompt="x").status_code == 200


@FAILING
def test_an_engine_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def broken() -> Any:
        raise AssertionError("books are wrong")

    with Engine(fresh("llama"), memory="4MiB", device="cpu") as engine, serving(engine) as served:
        assert served.http.get("/health").status_code == 200
        monkeypatch.setattr(engine._core, "step", broken)
        body: Any = {"prompt": [5, 6, 7], "stream": True}
        assert "books are wrong" in served.post(COMPLETIONS, **body).text
        assert "books are wrong" in error_of(served.post(COMPLETIONS, prompt=[5]), 503)["message"]
        assert "books are wrong" in error_of(served.http.get("/health"), 503)["message"]
        assert error_of(served.post("/admin/cache/reset"), 503)
        assert served.metrics()["hybridkv_up"] == 0
        assert served.metrics()["hybridkv_requests_total|failed"] == 2
