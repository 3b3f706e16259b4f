"""Tokenizing threads: a long text must delay neither other replies nor short texts.

A text of 16 MiB takes half a minute and cannot be interrupted. The workers are daemons, so the process does not wait
for it when it exits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from hybridkv.engine import Engine
from hybridkv.workers import Workers

T = TypeVar("T")

LONG_BYTES = 2**18
"""Requests with a body of at least this size use the thread for long texts."""


class Tokenizing:
    """One thread for short texts and one for long ones. A tokenizer that is not thread-safe gets a single thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._short = Workers(1, "hybridkv-tokenizer")
        can_share = isinstance(engine.tokenizer, PreTrainedTokenizerFast)
        self._long = Workers(1, "hybridkv-long-texts") if can_share else self._short

    async def run(self, work: Callable[[Engine], T], body_bytes: int) -> T:
        """Run `work`, which uses the engine's tokenizer, on one of the threads, and return its result."""
        workers = self._long if body_bytes >= LONG_BYTES else self._short
        return await asyncio.wrap_future(workers.submit(lambda: work(self._engine)))

    def close(self) -> None:
        for workers in {self._short, self._long}:
            workers.close()
