"""The same tensors in every run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_tensors() -> None:
    torch.manual_seed(0)
