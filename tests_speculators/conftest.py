"""These tests run in an environment of speculators' own: `make test-speculators`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(scope="session")
def stock() -> Any:
    """The demo model in stock transformers, with its tokenizer."""
    from stock_model import StockModel

    return StockModel()


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as speculators' EAGLE-3 has to be given it."""
    from plain_norm import with_plain_norm

    return with_plain_norm(tmp_path_factory.mktemp("verifier"))
