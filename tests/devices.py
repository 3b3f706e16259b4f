"""Where tests compute. `make test-gpu` runs those marked `cuda`; other runs have them too where there is a GPU."""

from __future__ import annotations

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
"""For tests that run on one device. Their files say `pytestmark = uses_device`."""
uses_device = [pytest.mark.cuda] if ON_GPU else []

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if ON_GPU else [])]
"""For tests that run on each device."""
DECODES = ["", "packed", *([pytest.param("graphs", marks=pytest.mark.cuda)] if ON_GPU else [])]
"""How a `Driver` decodes."""

_NO_GPU = pytest.mark.skipif(not ON_GPU, reason="no GPU")


def needs_gpu(test: object) -> object:
    """A test, or all tests of a class, that nothing but a GPU can run."""
    return pytest.mark.cuda(_NO_GPU(test))
