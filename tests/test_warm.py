"""Warm programs behave as those that are started the usual way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

ECHO = """
import os, sys
print(sys.argv, os.getcwd(), os.environ.get("SAID"), sys.stdin.read(), __name__)
print("é", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
STARTS: list[Any] = [subprocess.Popen, warm.Popen]


@pytest.mark.parametrize("kind", ["-c", "script", "-m"])
def test_arguments_streams_and_exit_codes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "echo_x.py").write_text(ECHO)
    words = {"-c": ["-c", ECHO], "script": [str(tmp_path / "echo_x.py")], "-m": ["-m", "echo_x"]}[kind]
    found = []
    for start in STARTS:
        with start(
            [sys.executable, *words, "3", "two words"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=tmp_path, env={**os.environ, "SAID": "so"},
        ) as process:  # fmt: skip
            found.append((*process.communicate("in"), process.returncode))
    assert found[0] == found[1]
    assert found[1][1:] == ("é\n", 3)


@pytest.mark.parametrize("start", STARTS)
def test_signals_and_waiting(start: Any) -> None:
    code = "import time; print('here', flush=True); time.sleep(60)"
    with start([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        os.kill(process.pid, 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (-signal.SIGINT, 1)
    with start([sys.executable, "-c", code], start_new_session=True) as process:
        while os.getsid(process.pid) != process.pid:
            pass
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_a_program_has_torch_at_once() -> None:
    code = "import sys; print('torch' in sys.modules, 'hybridkv.engine' in sys.modules)"
    assert warm.run([sys.executable, "-c", code], check=True).stdout == "True True\n"
    with pytest.raises(subprocess.CalledProcessError):
        warm.run([sys.executable, "-c", "raise SystemExit(2)"], check=True)
    assert "ZeroDivisionError" in warm.run([sys.executable, "-c", "1 / 0"]).stderr


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="start it the usual way"):
        warm.Popen("echo", shell=True)
