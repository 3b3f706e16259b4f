"""Requests in parallel: coroutines on one thread, a bounded number at once, waited for together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from threading import Lock, Thread
from typing import TypeVar

from hybridkv.errors import StoreError, StoreFault

Result = TypeVar("Result")
Call = Callable[[], Awaitable[Result]]

_JOIN_S = 5.0


class Parallel:
    """The thread starts with the first call and ends with `close`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    def run(self, calls: Sequence[Call[Result]]) -> list[Result | StoreError]:
        """Results in order. After a StoreFault no more calls begin: the fault stands in their places."""
        if not calls:
            return []
        loop = self._started()
        future = asyncio.run_coroutine_threadsafe(_all(calls, self._most), loop)
        try:
            return future.result()
        except CancelledError:
            raise StoreFault("the store was closed meanwhile") from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(_end, loop)
            thread.join(_JOIN_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise StoreFault("the store is closed")
            if self._pid != os.getpid():  # its thread is not there
                raise StoreFault("this process was forked after the store was opened; open it after that")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=_live, args=(self._loop,), name="hybridkv-bucket", daemon=True)
                self._thread.start()
            return self._loop


def _live(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        loop.run_until_complete(asyncio.wait(tasks))  # they were cancelled: their callers wait for them
    loop.close()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.stop()


async def _all(calls: Sequence[Call[Result]], most: int) -> list[Result | StoreError]:
    results: dict[int, Result | StoreError] = {}
    failed: list[StoreFault] = []

    async def work(left: Iterator[tuple[int, Call[Result]]]) -> None:
        for number, call in left:
            if failed:
                results[number] = failed[0]
                continue
            try:
                results[number] = await call()
            except StoreError as error:
                results[number] = error
                if isinstance(error, StoreFault):
                    failed.append(error)

    left = iter(enumerate(calls))
    await asyncio.gather(*(work(left) for _ in range(min(most, len(calls)))))
    return [results[number] for number in range(len(calls))]
