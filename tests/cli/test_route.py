"""`hybridkv route` as people start and stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybridkv.cli.main import run
from hybridkv.serve import ConnectionLimits

PATIENCE_S = 60.0
WORKERS = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"]


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process leave its logs alone."""
    monkeypatch.setattr("hybridkv.serve.set_up_logs", lambda log_format, level: None)


@pytest.mark.parametrize(("args", "message"), [
    ([], "no prefill worker: name one with --prefill"),
    (WORKERS[:2], "no decode worker: name one with --decode"),
    ([*WORKERS, "--decode", "127.0.0.1:8200"], "write http://HOST:PORT"),
    ([*WORKERS, "--decode", "http://127.0.0.1:1/"], "--decode names a worker twice"),
    ([*WORKERS, "--port", "70000"], "port 70000"),
    ([*WORKERS, "--max-body", "1"], "choose 1KiB or more"),
    ([*WORKERS, "--prefill-timeout", "0"], "choose more than 0"),
    ([*WORKERS, "--prefill-timeout", "nan"], "choose more than 0"),
    ([*WORKERS, "--shutdown-timeout", "-1"], "choose 0 or more"),
    ([*WORKERS, "--api-key", ""], "an API key that is empty"),
    ([*WORKERS, "--allowed-host", "x:80"], "allowed host 'x:80'"),
    ([*WORKERS, "--cors-origin", "*"], "CORS origin '*' without an API key"),
    ([*WORKERS, "--max-connections", "0"], "max connections 0"),
    ([*WORKERS, "--log-level", "loud"], "log level 'loud'"),
    ([*WORKERS, "--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
])  # fmt: skip
def test_wrong_options(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["route", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hybridkv: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_options_reach_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(BaseException):
        """Carries the router's options out of the command."""

    def make(options: Any) -> None:
        raise Made(options)

    monkeypatch.setattr("hybridkv.route.make_router", make)
    sites = ["--allowed-host", "gpu.example", "--cors-origin", "*", "--api-key", "k"]
    limits = ["--max-connections", "9", "--max-connections-per-address", "4", "--receive-timeout", "2.5"]
    with pytest.raises(Made) as caught:
        run(["route", *WORKERS, "--port", "0", *sites, *limits])
    options = caught.value.args[0]
    assert (options.allowed_hosts, options.cors_origins) == (("gpu.example", "127.0.0.1"), ("*",))
    assert options.connections == ConnectionLimits(9, 4, 2.5)


def test_a_router_from_start_to_end() -> None:
    """It says where it is, tells that no decode worker is there, and ends on SIGTERM."""
    command = [sys.executable, "-c", "from hybridkv.cli import main; main()", "route", *WORKERS, "--port", "0"]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    process = subprocess.Popen([*command, "--early"], text=True, env=environment, **streams)
    try:
        told = []
        for line in process.stdout or ():
            told.append(line)
            if "Routing at" in line:
                break
        reply = httpx.post(f"{told[-1].split()[-1]}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S)
        assert reply.status_code == 503
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 0
    assert "  prefill: http://127.0.0.1:1\n" in told
    assert "reason=down" in log
    assert "path=/v1/completions status=503 outcome=failed" in log
