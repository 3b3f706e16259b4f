"""Kills `hybridkv extract` while it runs. A program of its own: it forks after torch is imported, to be fast.

    python -m tests.cli.extract_processes PART CHECKPOINT INPUT OUT

Exits with 0 if all went well, and says on stderr what did not.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import hybridkv.engine  # noqa: F401 - before any fork
from hybridkv import taps
from hybridkv.cli.main import run

KILLS = int(os.environ.get("HYBRIDKV_KILLS", "3"))
DONE = "hidden_states/hs_*.safetensors"


def extract(*args: str) -> int:
    """In a child: the engine's threads must not be forked."""
    pid = os.fork()
    if not pid:
        os._exit(run(["extract", *args]))
    return pid


def files(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in out.glob(DONE)}


def end_at(pid: int, out: Path, count: int, number: int) -> int:
    """Send a signal once there are so many files. Returns the exit code, negative if a signal ended it."""
    deadline = time.monotonic() + 120
    while len(files(out)) < count and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < deadline, f"no {count} samples after two minutes"
        time.sleep(0.002)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(args: list[str], out: Path, total: int) -> None:
    """Kill it again and again, each time some samples later. In the end every sample is there once, and none twice."""
    source, before = random.Random(1), dict[str, int]()
    room = max(1, (total - 10) // (2 * KILLS))
    for _ in range(KILLS):
        target = len(before) + source.randint(1, room)
        assert end_at(extract(*args), out, target, signal.SIGKILL) == -signal.SIGKILL
        now = files(out)
        assert before.items() <= now.items(), "a sample was lost or computed again"
        before = now
        for sample in taps.open(out, partial=True):
            assert len(sample["hidden_states"]) == len(sample["token_ids"])
    assert os.waitpid(extract(*args), 0)[1] == 0
    assert before.items() <= files(out).items()
    found = [sample["index"] for sample in taps.open(out, shuffle=False)]
    assert found == list(range(total))
    assert {path.name for path in (out / "hidden_states").iterdir()} == files(out).keys(), "something is left behind"


def interrupt(args: list[str], out: Path, total: int) -> None:
    """Ctrl-C: exit code 130, whole files, and the next run goes on."""
    code = end_at(extract(*args), out, 5, signal.SIGINT)
    assert code == 130, code
    before = files(out)
    assert 5 <= len(before) < total
    assert len(list(taps.open(out, partial=True))) == len(before)
    assert not any(path.name.startswith(".hs") for path in (out / "hidden_states").iterdir())
    assert os.waitpid(extract(*args), 0)[1] == 0
    assert before.items() <= files(out).items()
    assert len(taps.open(out)) == total


PARTS = {"kill": kill, "interrupt": interrupt}

if __name__ == "__main__":
    part, checkpoint, source_file, out_folder = sys.argv[1:]
    arguments = [checkpoint, "--input", source_file, "--out", out_folder, "--layers", "0,1,-1", "--memory", "16MiB"]
    num_samples = len(Path(source_file).read_text().splitlines())
    PARTS[part]([*arguments, "--device", "cpu", "--queue", "4MiB"], Path(out_folder), num_samples)
