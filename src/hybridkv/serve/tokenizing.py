"""Threads in which texts become tokens: a long text must hold up neither others' replies nor others' short texts."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerFast

from hybridkv.engine import Engine

T = TypeVar("T")

LONG_BYTES = 2**18
"""Of a request's body; from here on it waits for the other long ones."""


class Tokenizing:
    """One thread for short texts and one for long ones. A tokenizer that is not made for two threads gets one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._short = _Lane("hybridkv-tokenizer")
        can_share = isinstance(engine.tokenizer, PreTrainedTokenizerFast)
        self._long = _Lane("hybridkv-long-texts") if can_share else self._short

    async def run(self, work: Callable[[Engine], T], body_bytes: int) -> T:
        """What `work` makes of the engine's tokenizer."""
        lane = self._long if body_bytes >= LONG_BYTES else self._short
        return await asyncio.wrap_future(lane.submit(lambda: work(self._engine)))

    def close(self) -> None:
        for lane in {self._short, self._long}:
            lane.close()


class _Lane:
    """One thread, one piece of work after the other.

    Unlike an executor's, the process does not wait for it: a text of 16 MiB takes half a minute, and nothing stops it.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """What it returns or raises; may be cancelled until it begins."""
        answer: Future[T] = Future()
        self._work.put((answer, work))
        return answer

    def close(self) -> None:
        """After what was submitted."""
        self._work.put(None)

    def _run(self) -> None:
        while (asked := self._work.get()) is not None:
            answer, work = asked
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(work())
            except BaseException as error:  # raised again where the answer is awaited
                answer.set_exception(error)
