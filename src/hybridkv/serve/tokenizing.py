"""Threads in which texts become tokens: a long text must hold up neither others' replies nor others' short texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from hybridkv.engine import Engine

T = TypeVar("T")

LONG_BYTES = 2**18
"""Of a request's body; from here on it waits for the other long ones."""


class Tokenizing:
    """One thread for short texts and one for long ones. A tokenizer that is not made for two threads gets one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._short = ThreadPoolExecutor(1, "hybridkv-tokenizer")
        can_share = isinstance(engine.tokenizer, PreTrainedTokenizerFast)
        self._long = ThreadPoolExecutor(1, "hybridkv-long-texts") if can_share else self._short

    async def run(self, work: Callable[[Engine], T], body_bytes: int) -> T:
        """What `work` makes of the engine's tokenizer."""
        lane = self._long if body_bytes >= LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(lane, work, self._engine)

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
