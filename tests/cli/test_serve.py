"""`hybridkv serve` as people start and stop it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybridkv.cli.main import run
from hybridkv.serve import ConnectionLimits
from tests import warm
from tests.engine.checkpoints import save_checkpoint

PATIENCE_S = 60.0
SMALL = ["--memory", "16MiB", "--device", "cpu", "--port", "0"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("served") / "it's tiny"
    save_checkpoint("qwen3_next", directory)
    return str(directory)


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process leave its logs alone."""
    monkeypatch.setattr("hybridkv.serve.set_up_logs", lambda log_format, level: None)


class Process:
    """A server that has told where it is."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.told: list[str] = []
        assert process.stdout is not None
        for line in process.stdout:
            self.told.append(line.rstrip("\n"))
            if line.startswith("curl "):
                break
        [self.url] = [line.split()[2] for line in self.told if line.startswith("Serving at ")]

    @property
    def curl(self) -> str:
        return self.told[-1]

    def end(self) -> tuple[int, str]:
        """The exit code, and the log."""
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log


@contextmanager
def started(*args: str, start: Any = warm.Popen, **environment: str) -> Iterator[Process]:
    command = [str(Path(sys.executable).with_name("hybridkv")), "serve", *args]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    process = start(command, text=True, env={**os.environ, **environment}, **streams)
    try:
        yield Process(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def stream_while_stopping(server: Process, key: str = "", **body: Any) -> str:
    """Ask for a stream, tell the server to stop at its first piece, and read on."""
    sent = {"prompt": "The user asks", "stream": True, "ignore_eos": True, **body}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=sent, headers=headers, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        return "\n".join([first, *lines])


def test_a_server_from_start_to_end(checkpoint: str) -> None:
    """It tells a line that works; a stream that is under way when it is told to stop comes to its end; it logs JSON."""
    options = [*SMALL, "--log-format", "json", "--store", "memory://?size=4MiB"]
    with started(checkpoint, *options, start=subprocess.Popen) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert "  store: memory://?size=4MiB" in server.told
        assert any("it's tiny on cpu" in line for line in server.told)
        assert any(line.startswith("  kernels: prefill torch, decode torch") for line in server.told)
        if shutil.which("curl"):
            done = subprocess.run(["sh", "-c", server.curl], capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
        text = stream_while_stopping(server, max_tokens=300)
        code, log = server.end()
    assert code == 0
    assert text.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in text
    last = [json.loads(line) for line in log.splitlines()][-1]
    assert (last["path"], last["status"], last["outcome"]) == ("/v1/completions", 200, "completed")
    assert (last["reply_tokens"], last["level"]) == (300, "info")


def test_patience_with_long_replies_ends(checkpoint: str) -> None:
    """64 long replies take longer than the second they are given; keys come from the environment."""
    with started(
        checkpoint, *SMALL, "--shutdown-timeout", "1", "--served-model-name", "mine", HYBRIDKV_API_KEY="k3y"
    ) as server:
        assert "Authorization: Bearer $KEY" in server.curl
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        models = httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer k3y"}).json()
        assert (models["data"][0]["id"], models["data"][0]["root"]) == ("mine", checkpoint)
        body = {"model": checkpoint, "prompt": "x"}
        asked = httpx.post(f"{server.url}/tokenize", json=body, headers={"Authorization": "Bearer k3y"})
        assert asked.status_code == 200
        text = stream_while_stopping(server, key="k3y", n=64, max_tokens=480)
        code, log = server.end()
    assert code == 0
    error, done = [line for line in text.splitlines() if line][-2:]
    assert "the server is stopping" in error
    assert done == "data: [DONE]"
    assert "info    stopping: a second Ctrl-C waits for nobody requests=1 shutdown_timeout=1" in log
    assert "path=/v1/completions status=200 outcome=stopped" in log
    assert "Traceback" not in log


def test_a_second_interrupt_waits_for_nobody(checkpoint: str) -> None:
    with started(checkpoint, *SMALL, "--shutdown-timeout", "60") as server:
        sent = {"prompt": "The user asks", "stream": True, "ignore_eos": True, "n": 64, "max_tokens": 480}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=sent, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            assert server.process.stderr is not None
            said = server.process.stderr.readline()
            server.process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        code, log = server.end()
    assert (code, last) == (0, "data: [DONE]")
    assert "stopping: a second Ctrl-C" in said
    assert "outcome=stopped" in log
    assert "Traceback" not in log


def test_without_a_model_it_serves_the_demo_model() -> None:
    """Under the name in the line that it tells, which asks for a reply that is the same every time."""
    with started("--memory", "32MiB", "--device", "cpu", "--port", "0", "--log-level", "error") as server:
        assert any(line.startswith("hybridkv-demo on cpu") for line in server.told)
        body = json.loads(shlex.split(server.curl)[-1])
        assert body == {
            "model": "hybridkv-demo",
            "messages": [{"role": "user", "content": "Who are you?"}],
            "max_tokens": 64,
            "temperature": 0,
        }
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == (0, "")
    assert reply["model"] == "hybridkv-demo"
    assert "hybridkv" in reply["choices"][0]["message"]["content"].lower()
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_server_that_nobody_uses_stops_without_a_word(checkpoint: str) -> None:
    with started(checkpoint, *SMALL, "--shutdown-timeout", "0") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == (0, "")


def test_an_empty_key_from_the_environment_opens_no_door(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRIDKV_API_KEY", "")
    assert "an API key that is empty" in complaint(capsys, "no model is needed for this")
    monkeypatch.setenv("HYBRIDKV_API_KEY", "key")
    monkeypatch.setenv("HYBRIDKV_OPERATOR_KEY", "")
    assert "an operator key that is empty" in complaint(capsys, "no model is needed for this")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {"operator_key": "of the environment", "is_local": True, "history": 1000, "ui": True}),
        (["--operator-key", "k", "--history", "7", "--no-ui"], {"operator_key": "k", "history": 7, "ui": False}),
        (["--host", "0.0.0.0"], {"is_local": False, "allowed_hosts": ("0.0.0.0",), "cors_origins": ()}),
        (
            ["--allowed-host", "gpu.example", "--cors-origin", "https://chat.example", "--cors-origin", "http://x:1"],
            {"allowed_hosts": ("gpu.example", "127.0.0.1"), "cors_origins": ("https://chat.example", "http://x:1")},
        ),
        (
            ["--max-connections", "9", "--max-connections-per-address", "4", "--receive-timeout", "2.5"],
            {"connections": ConnectionLimits(9, 4, 2.5)},
        ),
        ([], {"connections": ConnectionLimits()}),
    ],
)
def test_options_reach_the_server(args: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(BaseException):
        """Carries the server's options out of the command."""

    def make(engine: object, options: Any) -> None:
        raise Made(options)

    monkeypatch.setenv("HYBRIDKV_OPERATOR_KEY", "of the environment")
    monkeypatch.setattr("hybridkv.serve.make_app", make)
    monkeypatch.setattr("hybridkv.cli.engine_options.EngineOptions.start", lambda *_, **__: nullcontext())
    with pytest.raises(Made) as caught:
        run(["serve", "no model is needed for this", "--port", "0", *args])
    options = caught.value.args[0]
    assert {name: getattr(options, name) for name in expected} == expected


def complaint(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert run(["serve", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hybridkv: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_port_in_use_is_known_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = complaint(capsys, "no model is needed for this", "--port", str(port))
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in error


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "70000"], "port 70000: choose 0 (any free one) to 65535"),
        (["--port", "-1"], "port -1"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--max-waiting", "0"], "max waiting 0"),
        (["--trusted-proxy", "gate"], "trusted proxy: 'gate'"),
        (["--max-body", "much"], "'much'"),
        (["--max-body", "1023"], "max body 1023 bytes: no request would fit; choose 1KiB or more"),
        (["--hidden-layers", "2,18"], "--hidden-layers 2,18 without --hidden-states-dir: name a directory"),
        (["--hidden-layers", "2;18", "--hidden-states-dir", "x"], "--hidden-layers 2;18: write numbers with commas"),
        (["--hidden-states-dir", "/dev/null/x"], "cannot write hidden states to /dev/null/x: Not a directory"),
        (["--hidden-states-size", "0"], "--hidden-states-size 0: no hidden states would fit"),
        (["--hidden-states-ttl", "0"], "--hidden-states-ttl 0: choose 1 second or more"),
        (["--hidden-states-size", "10GiB"], "--hidden-states-size 10GiB without --hidden-states-dir: name a directory"),
        (["--hidden-states-ttl", "600"], "--hidden-states-ttl 600 without --hidden-states-dir: name a directory"),
        (["--shutdown-timeout", "-1"], "shutdown timeout -1 s"),
        (["--allowed-host", "gpu.example:8000"], "allowed host 'gpu.example:8000': write a name without a port"),
        (["--cors-origin", "*"], "CORS origin '*' without an API key"),
        (["--max-connections", "0"], "max connections 0: at least 1 client must be let in"),
        (["--max-connections-per-address", "0"], "max connections per address 0"),
        (["--receive-timeout", "0"], "receive timeout 0.0 s: choose a number above 0"),
        (["--log-format", "xml"], "log format 'xml': choose text or json"),
        (["--log-level", "loud"], "log level 'loud'"),
        (["--api-key", ""], "an API key that is empty"),
        (["--api-key", "schlüssel"], "other than printable ASCII"),
        (["--operator-key", ""], "an operator key that is empty"),
        (["--operator-key", "a\nb"], "other than printable ASCII"),
        (["--history", "-1"], "history -1: choose a number of requests, or 0 to keep none"),
        (["--memory", "much", "--port", "0"], "'much'"),
        (["--max-num-seqs", "0", "--port", "0"], "max_num_seqs 0"),
        (["--port", "0"], "no directory"),
    ],
)
def test_nonsense_gets_one_line_and_exit_code_2(
    args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(capsys, str(tmp_path / "nothing here"), *args)
