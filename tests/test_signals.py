"""Tests run alike however they were started: in the background of a script SIGINT is ignored, and that is inherited."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
IGNORING = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
)
HANDLER = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_interrupts_reach_the_processes_that_tests_start() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    done = subprocess.run([sys.executable, "-c", HANDLER], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_so_they_do_where_tests_inherit_that_interrupts_are_ignored() -> None:
    test = f"{Path(__file__).relative_to(ROOT)}::{test_interrupts_reach_the_processes_that_tests_start.__name__}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test]
    done = subprocess.run([sys.executable, "-c", IGNORING, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
