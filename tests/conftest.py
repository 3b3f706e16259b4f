"""Hypothesis profiles: the same examples in every run, unless HYPOTHESIS_PROFILE=explore asks for new ones.

Tests run side by side, one process a core: each computes with one thread, or they wait for one another.

Without an NVIDIA GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported, as torch may do.

SIGINT does what it usually does: in the background of a script it is ignored, and what tests start would inherit that.
"""

import gc
import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# `make test-gpu` runs its tests without a package that is installed, too: as if it were not there.
for _name in filter(None, os.environ.get("HYBRIDKV_TEST_WITHOUT", "").split(",")):
    sys.modules[_name] = None  # type: ignore[assignment]

pytest_plugins = ["tests.covering", "tests.timings"]


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector need not look at it again and again, which took 7% of the time."""
    gc.collect()
    gc.freeze()
