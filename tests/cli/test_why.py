"""`hybridkv why`: what it shows of a real server's records, and one clear line for all that goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from hybridkv import Engine
from hybridkv.cli.main import run
from tests.engine.checkpoints import save_checkpoint
from tests.engine.zoo import prompt
from tests.serve.serving import Served, serving

_FAR = b'{"data": [{"id": "a", "created": 1e30, "ttft_s": null, "outcome": "x"}]}'
"""A time that no calendar has."""


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYBRIDKV_API_KEY", "HYBRIDKV_OPERATOR_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("why") / "tiny"
    save_checkpoint("qwen3_next", directory)
    store = "memory://?size=16MiB"
    with (
        Engine(directory, memory="16MiB", device="cpu", store=store) as engine,
        serving(engine, api_keys=("mine",), operator_key="root") as served,
    ):
        served.http.headers["Authorization"] = "Bearer mine"
        yield served


@contextmanager
def answering(status: int, body: bytes, **headers: str) -> Iterator[str]:
    """A server that answers the same to everything, and is none of ours."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert run(["why", *args]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def complaint(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert run(["why", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hybridkv: error: ")
    assert captured.err.count("\n") == 1
    assert captured.err.rstrip("\n").isprintable()
    return captured.err


def test_a_request_is_explained(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.engine.reset_cache()
    ids = prompt(60)
    served.post("/v1/completions", prompt=ids, max_tokens=1)
    reply = served.post("/v1/completions", prompt=[*ids[:40], *prompt(20, 9)], max_tokens=3, ignore_eos=True).json()
    out = shown(capsys, reply["id"], "--url", served.url, "--api-key", "mine")
    lines = out.splitlines()
    assert lines[0].startswith(f"{reply['id']}  /v1/completions, ")
    assert lines[0].endswith(", completed")
    assert lines[3] == "0 of 60 prompt tokens were cached."
    assert lines[4].startswith("Keys and values match up to token 32, but no state was kept before token 32: 32 tokens")
    assert "░ computed 60 (100%)" in out
    assert "tokens 0 to 32" in out
    assert "Store: nothing more" in out
    assert "Reply tokens: 3, ended by length. Queue " in out
    assert "first token" in out
    again = served.post("/v1/completions", prompt=ids, max_tokens=3).json()
    out = shown(capsys, again["id"], "--url", served.url, "--api-key", "mine")
    assert "48 of 60 prompt tokens were cached." in out
    assert "█ memory 48 (80%)   ░ computed 12 (20%)" in out
    assert "Checkpoint: at token 48, of kind end, used 0 times before" in out
    assert "states at " in out


def test_what_a_store_has_given(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    ids = prompt(60, 3)
    served.post("/v1/completions", prompt=ids, max_tokens=1)
    served.engine.flush_store()
    served.engine.reset_cache()
    reply = served.post("/v1/completions", prompt=ids, max_tokens=3).json()
    out = shown(capsys, reply["id"], "--url", served.url, "--api-key", "mine")
    assert "▓ the store 48 (80%)   ░ computed 12 (20%)" in out
    assert "Store: loaded; it has the prompt to token 48; loaded to 48: " in out


def test_several_prompts(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    reply = served.post("/v1/completions", prompt=[prompt(5, 4), prompt(6, 5)], max_tokens=1).json()
    out = shown(capsys, reply["id"], "--url", served.url, "--api-key", "mine")
    assert "Prompt 1 of 2" in out
    assert "0 of 5 prompt tokens were cached." in out
    assert "0 of 6 prompt tokens were cached." in out


def test_the_latest_requests_are_listed(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"X-Request-Id": "by-name"}
    reply = served.http.post("/v1/completions", json={"prompt": [7], "max_tokens": 1}, headers=headers).json()
    monkeypatch.setenv("HYBRIDKV_API_KEY", "mine")
    out = shown(capsys, "--url", served.url)
    assert f"│ {reply['id']} │" in out
    monkeypatch.setenv("HYBRIDKV_OPERATOR_KEY", "root")
    monkeypatch.setenv("HYBRIDKV_API_KEY", "wrong")
    assert shown(capsys, "--url", served.url + "/") == out, "the operator's comes first"
    assert f"{reply['id']}  " in shown(capsys, "by-name", "--url", served.url)


def test_json(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    reply = served.post("/v1/completions", prompt=[7], max_tokens=1).json()
    found = json.loads(shown(capsys, reply["id"], "--url", served.url, "--api-key", "mine", "--json"))
    assert found == served.http.get(f"/v1/hybridkv/requests/{reply['id']}").json()
    listed = json.loads(shown(capsys, "--url", served.url, "--api-key", "root", "--json"))
    assert listed["data"][0]["id"] == reply["id"]


def test_no_requests_yet(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, b'{"object": "list", "data": []}') as url:
        assert shown(capsys, "--url", url) == "No requests yet.\n"


def test_a_prompt_that_has_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"id": "cmpl-1", "request_id": "x", "created": 0.0, "path": "/p", "outcome": "running", "prompts": [None]}
    with answering(200, json.dumps(record).encode()) as url:
        assert "It has not ended." in shown(capsys, "cmpl-1", "--url", url)


def test_what_goes_wrong(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    key = ["--api-key", "mine", "--url", served.url]
    assert "404: no request 'nope' of yours is known" in complaint(capsys, "nope", *key)
    assert "404: no request 'a/../b?c#d' of yours" in complaint(capsys, "a/../b?c#d", *key)
    assert "404: no request '\N{REPLACEMENT CHARACTER}' of yours" in complaint(capsys, "\udcff", *key)
    assert "401: a valid API key is needed" in complaint(capsys, "nope", "--url", served.url)
    assert "pass --api-key, or set $HYBRIDKV_OPERATOR_KEY" in complaint(capsys, "--url", served.url, "--api-key", "no")
    assert "an empty ID: pass the id of a reply" in complaint(capsys, "", *key)
    assert "an API key that is empty" in complaint(capsys, "--url", served.url, "--api-key", "")
    assert "no server answers at http://127.0.0.1:1: " in complaint(capsys, "--url", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://u@x", "http://x y"]
)
def test_addresses_that_are_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--url {url!r}: write http://HOST:PORT" in complaint(capsys, "--url", url)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"<html>", "answers 200: that is no hybridkv server"),
        (200, b"[]", "answers 200: that is no hybridkv server"),
        (404, b"nothing", "answers 404: that is no hybridkv server"),
        (404, b'{"error": "x"}', "answers 404: that is no hybridkv server"),
        (503, b'{"error": {"message": "down\\u001b[31m"}}', "answers 503: down\N{REPLACEMENT CHARACTER}[31m"),
        (200, b'{"data": [{"id": 1}]}', "answers in a form of another version"),
        (200, _FAR, "answers in a form of another version"),
    ],
)
def test_other_servers(status: int, body: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(status, body) as url:
        assert words in complaint(capsys, "--url", url)


def test_a_key_goes_to_no_other_server(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, b"{}") as other, answering(302, b"", Location=f"{other}/v1/hybridkv/requests") as url:
        assert "answers 302" in complaint(capsys, "--url", url, "--api-key", "secret")


def test_a_record_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "id": "\x1b[2J[bold]x",
        "request_id": "\x1b]0;y\x07",
        "created": 0.0,
        "path": "\x1b[31m",
        "outcome": "[red]z",
        "prompts": [],
    }
    with answering(200, json.dumps(record).encode()) as url:
        out = shown(capsys, "x", "--url", url)
    assert "\x1b" not in out
    assert "[bold]x" in out
    assert "[red]z" in out
