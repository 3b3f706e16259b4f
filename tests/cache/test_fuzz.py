"""Random interleavings of all verbs: short ones here, long ones with `make prove-cache`."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cache.fuzz import Chance, Fuzz


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_lives(data: st.DataObject) -> None:
    fuzz = Fuzz(Chance(lambda low, high: data.draw(st.integers(low, high))))
    for _ in range(data.draw(st.integers(1, 60))):
        fuzz.step()
        fuzz.check()
    fuzz.finish()


@pytest.mark.parametrize("seed", range(int(os.environ.get("HYBRIDKV_FUZZ_SEEDS", "60"))))
def test_seeded_lives(seed: int) -> None:
    rng = random.Random(seed)
    fuzz = Fuzz(Chance(rng.randint))
    for _ in range(int(os.environ.get("HYBRIDKV_FUZZ_STEPS", "300"))):
        fuzz.step()
        fuzz.check()
    fuzz.finish()
