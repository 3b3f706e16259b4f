"""What must pass on a fresh machine before anything lands. Ends with a table: part, tests, seconds.

Environments are set up side by side, and so are parts that leave a core idle. What a part prints is shown when it
ends. A part that has grown by a minute since the table in docs/testing.md is named: a warning, machines differ.
"""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STARTED = time.monotonic()
GROWN_S = 60
MORE_UNTIL_S = 1500
"""`test-more` is left out on a machine that has needed longer for the rest: the sample above covers every test."""


@dataclass
class Part:
    """A target of make. It starts when the parts in `after` have passed."""

    name: str
    after: list[str] = field(default_factory=list)
    may_fail: bool = False
    seconds: float = 0.0
    tests: int = 0

    def run(self) -> str:
        """Run it. Returns what it printed if it failed."""
        started = time.monotonic()
        print(f"--- {self.name} starts, {started - STARTED:.0f} s", flush=True)
        with tempfile.TemporaryFile("w+") as log:
            code = subprocess.call(["make", self.name], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            log.seek(0)
            said = log.read()
        self.seconds = time.monotonic() - started
        self.tests = sum(map(int, re.findall(r"(\d+) passed", said)))
        print(f"{said}--- {self.name}: exit code {code}, {self.seconds:.0f} s", flush=True)
        return said or self.name if code and not self.may_fail else ""


# A test part has both cores, or shares them with one that computes little. Mooncake's libraries come from Debian's
# archive: where that cannot be reached, its tests are skipped.
PARTS = [
    Part("setup"),
    Part("setup-fla", ["setup"]),
    Part("setup-oldest", ["setup"]),
    Part("lint", ["setup"]),
    Part("setup-vllm"),
    Part("setup-mooncake", ["setup", "setup-vllm"], may_fail=True),
    Part("setup-browser", ["setup-vllm"]),
    Part("setup-speculators", ["setup"]),
    Part("test", ["setup-fla", "setup-oldest", "setup-mooncake"]),
    Part("test-vllm", ["test", "lint", "setup-browser", "setup-speculators"]),
    Part("test-compiled", ["test-vllm"]),
    Part("test-browser", ["test-vllm"]),
    Part("test-speculators", ["test-browser"]),
]
if os.path.exists("/dev/nvidiactl"):
    PARTS.append(Part("test-gpu", ["test-compiled", "test-speculators"]))


def run_all(parts: list[Part]) -> bool:
    """Run the parts, those side by side that may be. Returns whether all have passed; none starts after a failure."""
    waiting, passed, has_failed = list(parts), set[str](), False
    running: dict[Future[str], Part] = {}
    with ThreadPoolExecutor(len(parts)) as pool:
        while running or (waiting and not has_failed):
            for part in [] if has_failed else [one for one in waiting if passed.issuperset(one.after)]:
                waiting.remove(part)
                running[pool.submit(part.run)] = part
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                part = running.pop(future)
                has_failed |= bool(future.result())
                passed.add(part.name)
    return not has_failed


def stated_seconds() -> dict[str, float]:
    """The seconds of each part in docs/testing.md."""
    rows = re.findall(r"^\| `make ([\w-]+)` \| *[\d,]* *\| ([\d,]+) \|", (ROOT / "docs/testing.md").read_text(), re.M)
    return {name: float(seconds.replace(",", "")) for name, seconds in rows}


def show(parts: list[Part]) -> None:
    """The table of parts, and warnings of those that have grown."""
    print(f"\n{'part':20} {'tests':>6} {'seconds':>8}")
    for part in parts:
        if part.seconds:
            print(f"{part.name:20} {part.tests or '':>6} {part.seconds:8.0f}")
    print(f"{'all':20} {sum(part.tests for part in parts):6} {time.monotonic() - STARTED:8.0f}")
    stated = stated_seconds()
    for part in parts:
        grown = part.seconds - stated.get(part.name, math.inf)
        if grown > GROWN_S:
            print(f"warning: {part.name} took {grown:.0f} s longer than the table in docs/testing.md says")


def main() -> int:
    # One seed for all: what `make test` draws, `make test-more` leaves out.
    seed = os.environ.setdefault("HYBRIDKV_TEST_SEED", str(random.SystemRandom().randrange(10**6)))
    print(f"HYBRIDKV_TEST_SEED={seed}", flush=True)
    parts = list(PARTS)
    all_passed = run_all(parts)
    elapsed = time.monotonic() - STARTED
    if all_passed and elapsed < MORE_UNTIL_S:
        parts.append(Part("test-more"))
        all_passed = run_all(parts[-1:])
    elif all_passed:
        print(f"test-more is left out: the rest took {elapsed:.0f} s")
    show(parts)
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
