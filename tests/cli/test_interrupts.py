"""Ctrl-C before a command has begun its work, and how the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hybridkv

MAIN = "sys.argv[:] = ['hybridkv', *sys.argv[1:]]\nfrom hybridkv.cli import main\nmain()"
AT_IMPORT = """
import atexit, os, signal, sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {action}

sys.meta_path.insert(0, Hook())
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "args"),
    [
        ("typer", ["models"]),
        ("hybridkv.plan", ["--help"]),
        ("torch", ["generate", "no model is needed", "-p", "x"]),
        ("torch.nn", ["chat", "no model is needed"]),
        ("transformers", ["serve", "no model is needed"]),
        ("uvicorn", ["serve", "no model is needed"]),
    ],
)
def test_while_modules_are_imported(module: str, args: list[str]) -> None:
    done = python(AT_IMPORT.format(module=module, action=INTERRUPT) + MAIN, *args)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_signal_that_is_ignored_stays_so() -> None:
    code = AT_IMPORT.format(module="typer", action=INTERRUPT) + "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + MAIN
    assert python(code, "--version").returncode == 0


def test_little_is_imported_before_that() -> None:
    """Until then a traceback is what there is."""
    source = str(Path(hybridkv.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {source!r}); import hybridkv.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert {"typer", "typing", "importlib.metadata"} & set(done.stdout.split()) == set()


@pytest.mark.parametrize(("args", "exit_code"), [(["--version"], 0), (["nonsense"], 2)])
def test_the_process_ends_without_taking_modules_apart(args: list[str], exit_code: int) -> None:
    """What was registered for its end happens, with the right exit code."""
    last = "class Last:\n    def __del__(self): print('apart')\nsys.modules['last'] = Last()\n"
    code = AT_IMPORT.format(module="typer", action="atexit.register(print, 'the end')") + last + MAIN
    done = python(code, *args)
    assert done.returncode == exit_code
    assert "the end\n" in done.stdout
    assert "apart" not in done.stdout
