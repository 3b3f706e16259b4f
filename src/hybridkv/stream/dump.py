"""Dumping: chunks are copied from their pages when their last layer has run, and written by other threads.

An object becomes visible only when the step that computed its last row has been committed. The bytes that wait to be
written are bounded: beyond the bound objects are dropped, and counted unless they only fill idle room. No step ever
waits for a store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from hybridkv.store import ObjectName, Store, StoreError, Writer
from hybridkv.stream.boxes import Span
from hybridkv.stream.form import Chunk, StoredGroup
from hybridkv.stream.row_io import Copy, PageBytes
from hybridkv.stream.stats import StreamStats
from hybridkv.workers import Workers

T = TypeVar("T")
LOG = logging.getLogger("hybridkv.stream")

_THREADS = 2
_SPARE_SHARE = 64
"""Spare objects that wait to be written take at most the store's idle room divided by this."""
_STALL_S = 3.0
"""`close` gives up on a store that has taken no row for this long."""


class Outgoing:
    """One object that is being written: its rows, then the decision to publish it, one action after the other."""

    def __init__(
        self,
        name: ObjectName,
        group: StoredGroup,
        spans: Sequence[Span],
        *,
        position: int,
        num_tokens: int,
        is_spare: bool = False,
    ) -> None:
        """`spans`: the pages of each chunk. `num_tokens`: tokens that need not be computed if the object is loaded.

        `is_spare`: it only fills idle room of the store.
        """
        self.name = name
        self.group = group
        self.spans = spans
        self.position = position
        self.is_spare = is_spare
        self.row_bytes = group.row_bytes(spans[0].num_tokens)
        self.num_bytes = sum(self.row_bytes)
        self.value = num_tokens / (self.num_bytes * group.share.total)
        self.writer: Writer | None = None
        self.is_begun = False
        self.is_judged = False
        self.failed = False
        self._due: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._lock = threading.Lock()

    @property
    def key(self) -> tuple[ObjectName, bool]:
        return self.name, self.is_spare

    def push(self, action: Callable[[], None]) -> bool:
        """Queue an action. True: the caller must have `work` called on some thread."""
        with self._lock:
            self._due.append(action)
            was_busy, self._is_busy = self._is_busy, True
        return not was_busy

    def work(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._is_busy = False
                    return
                action = self._due.popleft()
            action()


class Dumper:
    """Writes objects in the background."""

    def __init__(self, store: Store, pages: PageBytes, stats: StreamStats, max_waiting_bytes: int) -> None:
        self._store = store
        self._pages = pages
        self._stats = stats
        self._max_waiting_bytes = max_waiting_bytes
        self._changed = threading.Condition()
        """Notified when the store has taken or refused a row or an object."""
        self._writing: dict[tuple[ObjectName, bool], Outgoing] = {}
        """By name, and whether they are spare: objects that were begun and are neither published nor discarded."""
        self._spare_waiting = 0
        """Bytes of spare objects among them."""
        self._workers = Workers(_THREADS, "hybridkv-dump")

    def begin(self, outgoing: Outgoing) -> bool:
        """False: the object is being written already, or too many bytes wait to be written."""
        with self._changed:
            # A normal object may be written beside a spare one of its name: the store keeps one, as a normal object.
            if (outgoing.name, False) in self._writing or outgoing.key in self._writing:
                return False
            if not self._has_room(outgoing):
                self._stats.dumps_dropped += not outgoing.is_spare
                return False
            self._writing[outgoing.key] = outgoing
            self._stats.dump_bytes_waiting += outgoing.num_bytes
            self._spare_waiting += outgoing.num_bytes if outgoing.is_spare else 0
        return True

    def _has_room(self, outgoing: Outgoing) -> bool:
        """Whether an object may wait to be written. Spare objects have a bound of their own, and cost others none."""
        if outgoing.is_spare:
            most = max(self._max_waiting_bytes // 2, self._store.idle_bytes // _SPARE_SHARE)
            return self._spare_waiting + outgoing.num_bytes <= most
        waiting = self._stats.dump_bytes_waiting - self._spare_waiting
        return waiting + outgoing.num_bytes <= self._max_waiting_bytes

    def chunk(self, outgoing: Outgoing, number: int) -> None:
        """Copy a chunk out of its pages. Call when its last layer has run."""
        chunk, span = outgoing.group.chunks[number], outgoing.spans[number]
        try:
            copy = self._pages.copy_out(chunk, span)
        except (MemoryError, RuntimeError):  # no memory for a copy: the step continues, the object is lost
            outgoing.failed = True
            return
        self._do(outgoing, lambda: self._write(outgoing, chunk, copy))

    def judge(self, outgoing: Outgoing, counts: bool) -> None:
        """The step has ended: publish the object once its rows are written, or discard it if it does not count."""
        outgoing.is_judged = True
        self._do(outgoing, lambda: self._finish(outgoing, counts))

    def drain(self) -> None:
        """Wait until no object is being written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all objects that count are written. Returns early if the store hangs.

        Objects whose step has not ended are discarded.
        """
        with self._changed:
            unjudged = [one for one in self._writing.values() if not one.is_judged]
        for one in unjudged:
            self.judge(one, False)
        self._workers.close(timeout_s if self._wait_while_busy(timeout_s) else 0.0)

    def _wait_while_busy(self, timeout_s: float) -> bool:
        """False: `timeout_s` has passed, or the store hangs."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._writing:
                if not self._changed.wait(min(deadline - time.monotonic(), _STALL_S)):
                    return False
        return True

    def _do(self, outgoing: Outgoing, action: Callable[[], None]) -> None:
        if outgoing.push(action):
            self._workers.submit(outgoing.work)

    # --- on the writing threads ---------------------------------------------------------------------------------------

    def _write(self, outgoing: Outgoing, chunk: Chunk, copy: Copy) -> None:
        def write() -> None:
            copy.wait()
            if not outgoing.is_begun:
                outgoing.is_begun = True
                create = self._store.create_spare if outgoing.is_spare else self._store.create
                outgoing.writer = create(
                    outgoing.name, outgoing.row_bytes, value=outgoing.value, position=outgoing.position
                )
            if outgoing.writer is not None:
                for number, place in chunk.pieces(outgoing.spans[0].num_tokens):
                    outgoing.writer.write(number, [copy.data[place]])

        if not outgoing.failed:
            self._try(outgoing, write)

    def _finish(self, outgoing: Outgoing, counts: bool) -> None:
        writer, saved = outgoing.writer, False
        if writer is not None:
            if counts and not outgoing.failed:
                saved = bool(self._try(outgoing, writer.commit))
            if not saved:
                self._try(outgoing, writer.abort)
        with self._changed:
            stats = self._stats
            stats.dump_bytes_waiting -= outgoing.num_bytes
            self._spare_waiting -= outgoing.num_bytes if outgoing.is_spare else 0
            stats.dumps_failed += counts and outgoing.failed
            stats.dumps_discarded += not counts
            stats.dumped += saved
            stats.dumped_bytes += outgoing.num_bytes if saved else 0
            del self._writing[outgoing.key]
            self._changed.notify_all()

    def _try(self, outgoing: Outgoing, action: Callable[[], T]) -> T | None:
        """The result of `action`, or None if it raised: a store that fails costs this object and nothing else."""
        try:
            return action()
        except (StoreError, OSError):  # logged by the store's guard
            outgoing.failed = True
        except BaseException:  # no store should raise it: this log line is the only sign of the bug
            outgoing.failed = True
            LOG.exception("%s could not be written", outgoing.name)
        finally:
            with self._changed:
                self._changed.notify_all()
        return None
