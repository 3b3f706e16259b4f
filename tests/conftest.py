"""Hypothesis profiles: the same examples in every run, unless HYPOTHESIS_PROFILE=explore asks for new ones.

Tests run side by side, one process a core: each computes with one thread, or they wait for one another.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

pytest_plugins = ["tests.covering"]
