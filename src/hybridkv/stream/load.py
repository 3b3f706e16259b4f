"""Loading: rows of stored objects are read into pages, in the order in which layers need them.

A row that is missing, short, corrupt or late makes the load fail: rows after it are not read. `wait` returns at the
deadline at the latest. A row is read into a buffer of its own and reaches its pages only once it has been checked, so
`give_up` takes effect at once: a read that hangs continues in its thread, but no page is written after `give_up`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hybridkv.cache import Role
from hybridkv.store import CorruptObject, MissingObject, ObjectName, Store, StoreFault, UnknownFormat
from hybridkv.stream.boxes import Span
from hybridkv.stream.catalogue import Catalogue, Stretch
from hybridkv.stream.form import Chunk
from hybridkv.stream.openings import Openings
from hybridkv.stream.requests import PageRequest
from hybridkv.stream.row_io import PageBytes
from hybridkv.stream.source import Source
from hybridkv.stream.times import RowTime
from hybridkv.workers import Workers

_ALL_LAYERS = 1 << 30
_MOST_ROW_TIMES = 2048


class _Task(NamedTuple):
    """One chunk of a group at one position, and the pages that it goes to."""

    source: Source
    chunk: Chunk
    span: Span
    start: int
    """First token that is lost if the read fails."""
    end: int

    @property
    def needed_at(self) -> int:
        """The layer that waits for the chunk. None waits for hidden states."""
        return _ALL_LAYERS if self.source.group.role is Role.TAP else self.chunk.row.first_layer

    @property
    def order(self) -> tuple[int, int, int]:
        return self.needed_at, self.source.group.read_order, self.end


class Load:
    """Load of one request. Called on the engine thread; reader threads do the work."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        pages: PageBytes,
        request: PageRequest,
        keys: Mapping[int, bytes],
        *,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys`: by the end of each object. `deadline`: on `clock`; rows not loaded by then have failed."""
        self.start = request.start
        self.end = request.end
        self.num_bytes = 0
        """Bytes read so far."""
        self.seconds = 0.0
        """Time from the start of the load to its last row so far."""
        self.failure: str | None = None
        """Reason of the first failure: missing, corrupt, unknown, fault, error, timeout or aborted."""
        self.error: BaseException | None = None
        self.rows: list[RowTime] = []
        """When rows came; at most `_MOST_ROW_TIMES` of them."""
        self._pages = pages
        self._ordered = pages.order()
        self._is_plain = catalogue.is_plain
        self._deadline = deadline
        self._clock = clock
        self.began = clock()
        self._good_until = self.end
        self._changed = threading.Condition()
        self._openings = Openings(store)
        tasks = _tasks(store, self._openings, catalogue, request, keys)
        self._waiting = deque(sorted(tasks, key=lambda task: task.order))
        """Rows that no reader has taken yet."""
        self._num_reading = 0
        self._num_copying = 0
        """Readers that are copying a row into its pages."""
        self._is_given_up = False
        self._left = Counter(task.needed_at for task in self._waiting)
        """Number of rows that are not loaded yet, by the layer that waits for them."""
        self._sources = list(dict.fromkeys(task.source for task in self._waiting))
        for source in self._sources:
            self._openings.expect(source.expected)

    @property
    def names(self) -> list[ObjectName]:
        """Objects that were read, in the order in which they are needed."""
        return [name for source in self._sources for name in source.names]

    @property
    def is_over(self) -> bool:
        """Every row has been read, or the load was given up. No page is written after that."""
        with self._changed:
            return self._is_given_up or self._is_read

    @property
    def is_reading(self) -> bool:
        """Whether the load occupies readers, or will. A read that hangs occupies one even after `give_up`."""
        with self._changed:
            return not self._is_read

    @property
    def num_hanging(self) -> int:
        """Number of readers that the load still occupies after its deadline."""
        return self._num_reading if self._clock() >= self._deadline else 0

    @property
    def _is_read(self) -> bool:
        return not self._waiting and not self._num_reading

    @property
    def num_good(self) -> int:
        """Number of tokens that were loaded correctly. Valid once `is_over` is True."""
        return self._good_until - self.start

    def submit(self, readers: Workers, on_over: Callable[[], None]) -> None:
        """Queue all rows, in the order of layers. The reader of the last row calls `on_over`."""
        for _ in range(len(self._waiting)):
            readers.submit(lambda: self._read_next(on_over))

    def wait(self, layer: int, most_s: float | None = None) -> bool:
        """Wait until all rows that begin at `layer` or before are loaded, the load fails, or its deadline passes.

        Returns False if `most_s` has passed before that.
        """
        stop = None if most_s is None else time.monotonic() + most_s
        with self._changed:
            while self.failure is None and any(count for first, count in self._left.items() if first <= layer):
                left = self._deadline - self._clock()
                if left <= 0:
                    break
                if stop is not None:
                    left = min(left, stop - time.monotonic())
                    if left <= 0:
                        return False
                self._changed.wait(left)
        self.expire()
        return True

    def expire(self) -> None:
        """Give up if the deadline has passed."""
        if self._clock() >= self._deadline and not self.is_over:
            self.give_up("timeout", TimeoutError("not all rows came in time"))

    def finish(self, most_s: float | None = None) -> bool:
        """Wait for all rows. After a failure or at the deadline, give up on the rest.

        Returns False if `most_s` has passed before that.
        """
        if not self.wait(_ALL_LAYERS, most_s):
            return False
        if not self.is_over:
            self.give_up("aborted", RuntimeError("another row failed"))
        return True

    def give_up(self, failure: str, error: BaseException) -> None:
        """Write no page from now on. Reads under way continue until they end, and their rows are dropped."""
        with self._changed:
            self._is_given_up = True
            self._changed.wait_for(lambda: not self._num_copying)
        self._fail(failure, self.start, error)
        if not self.is_reading:
            self._close()

    def _read_next(self, on_over: Callable[[], None]) -> None:
        with self._changed:
            if not self._waiting:
                return  # given up
            task = self._waiting.popleft()
            self._num_reading += 1
        start = self._clock()
        try:
            self._read(task)
        except MissingObject as error:
            self._fail("missing", task.start, error)
        except CorruptObject as error:
            self._fail("corrupt", task.start, error)
        except UnknownFormat as error:
            self._fail("unknown", task.start, error)
        except (StoreFault, OSError) as error:
            self._fail("fault", task.start, error)
        except BaseException as error:  # any other error: the request computes these tokens instead
            self._fail("error", task.start, error)
        self._read_over(task, start, on_over)

    def _read(self, task: _Task) -> None:
        staged = self._pages.stage(task.chunk.nbytes(task.source.num_tokens))
        task.source.read(task.chunk, staged)
        with self._changed:
            self.num_bytes += len(staged)
            if self._is_given_up:
                return
            self._num_copying += 1
        try:
            self._ordered()
            self._pages.copy_in(task.chunk, task.span, staged)
        finally:
            with self._changed:
                self._num_copying -= 1
                self._changed.notify_all()

    def _fail(self, failure: str, start: int, error: BaseException) -> None:
        """Tokens from `start` on are lost. With windows or states, which are valid only at the end, all are lost."""
        with self._changed:
            if self.failure is None:
                self.failure, self.error = failure, error
            self._good_until = min(self._good_until, max(self.start, start) if self._is_plain else self.start)
            self._waiting = deque(task for task in self._waiting if task.end <= self._good_until)
            self._changed.notify_all()

    def _read_over(self, task: _Task, start: float, on_over: Callable[[], None]) -> None:
        row, now = task.chunk.row, self._clock()
        with self._changed:
            if len(self.rows) < _MOST_ROW_TIMES:
                nbytes = task.chunk.nbytes(task.source.num_tokens)
                self.rows.append(RowTime(task.source.group.name, row.first_layer, row.last_layer, nbytes, start, now))
            self._left[task.needed_at] -= 1
            self._num_reading -= 1
            self.seconds = now - self.began
            self._changed.notify_all()
            is_read = self._is_read
        if is_read:
            self._close()
            on_over()

    def _close(self) -> None:
        for source in self._sources:
            source.close()
        self._openings.close()


def _tasks(
    store: Store, openings: Openings, catalogue: Catalogue, request: PageRequest, keys: Mapping[int, bytes]
) -> list[_Task]:
    tasks: list[_Task] = []
    start, end, size = request.start, request.end, catalogue.block_tokens
    for group in catalogue.needed(request.blocks):
        for e in catalogue.ends(group, start, end):
            stretch = catalogue.stretch(group, e)
            source = Source(store, openings, catalogue, group, keys[e], e)
            for chunk in group.chunks:
                pages = _pages_to_fill(request, chunk.table, stretch, group.sight.first_visible_block(end, size), size)
                if any(page is not None for page in pages):
                    span = Span(pages, source.num_tokens, size)
                    tasks.append(_Task(source, chunk, span, stretch.first * size, e))
    for group in catalogue.state_groups:
        source = Source(store, openings, catalogue, group, keys[end], end)
        for chunk in group.chunks:
            page = request.states[chunk.table][end][chunk.row.page]
            tasks.append(_Task(source, chunk, Span([page], 1, 1), start, end))
    return tasks


def _pages_to_fill(
    request: PageRequest, table: str, stretch: Stretch, first_visible: int, block_tokens: int
) -> list[int | None]:
    """The pages of a stretch; None for blocks that the request has already or does not see."""
    first, filled = max(request.start // block_tokens, first_visible), request.filled.get(table, ())
    return [
        request.blocks[table][block] if block >= first and block not in filled else None
        for block in range(stretch.first, stretch.last)
    ]
