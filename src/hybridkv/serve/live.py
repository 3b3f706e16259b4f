"""The stream of live events: what memory, steps, prefixes and requests look like now.

One task makes the events, and only while there are readers. A snapshot is serialized once, and every reader gets the
same bytes. Readers take the newest when they are ready for it: a slow one misses snapshots and queues nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, NamedTuple

from hybridkv.engine import Engine
from hybridkv.engine.inspection.publishing import Snapshot
from hybridkv.errors import HybridKVError
from hybridkv.serve.access import Caller
from hybridkv.serve.failures import error_body, status_of
from hybridkv.serve.history import History
from hybridkv.serve.jobs import TooBusyError
from hybridkv.serve.streams import EventStream, data_event

LOG = logging.getLogger("hybridkv.serve")
TOPICS = ("memory", "steps", "prefixes", "requests")
_SNAPSHOTS = frozenset(("memory", "prefixes"))
"""Topics whose events are snapshots that the engine makes."""
OPERATOR_TOPICS = frozenset(("prefixes",))
MAX_STREAMS = 512
MAX_STREAMS_PER_KEY = 64
"""Most streams of one API key. The operator's key has no such limit."""
PERIOD_S = 0.25
_FIRST_PERIOD_S = 0.02
"""Period while a snapshot that readers want has not been made yet."""
_FIRST_PERIODS = 50
HEARTBEAT_S = 15.0
_TURNS_PER_LOOK = 4
"""Readers look whether a heartbeat is due once in so many turns."""
_ALIVE = b": alive\n\n"
_FIRST_STEPS = 300
_FIRST_REQUESTS = 100

Serialize = Callable[[dict[str, Any]], Coroutine[Any, Any, str]]
"""Makes the JSON of a prefix snapshot, with the texts of its prefixes."""


class _Frame(NamedTuple):
    version: int
    event: bytes


class _Reader:
    """One open stream."""

    def __init__(self, topics: frozenset[str], caller: Caller) -> None:
        self.topics = [topic for topic in TOPICS if topic in topics]
        self.caller = caller
        self.versions: dict[str, int] = {}
        """Versions of the snapshots that were sent last."""
        self.step: int | None = None
        self.request: int | None = None


class Live:
    """All streams of a server."""

    def __init__(
        self, engine: Engine, history: History, serialize_prefixes: Serialize, max_streams: int = MAX_STREAMS
    ) -> None:
        self._engine = engine
        self._history = history
        self._serialize_prefixes = serialize_prefixes
        self._max_streams = max_streams
        self._readers: set[_Reader] = set()
        self._frames: dict[str, _Frame] = {}
        self._steps: dict[int | None, tuple[bytes | None, int | None]] = {}
        """By the step that a reader knows: the event for it, and the last step in that. Emptied at every turn."""
        self._last_step = -1
        self._turn = asyncio.Event()
        """Set when there may be something new; then replaced."""
        self._building: asyncio.Task[None] | None = None
        self._serializing: asyncio.Task[None] | None = None
        self._failure: bytes | None = None
        self._is_stopping = False

    @property
    def num_streams(self) -> int:
        return len(self._readers)

    def open(self, topics: frozenset[str], caller: Caller) -> EventStream:
        """A stream of the topics' events."""
        if len(self._readers) >= self._max_streams:
            raise TooBusyError(f"{self._max_streams} streams of live events are open, which is the limit: close one")
        own = sum(reader.caller.owner == caller.owner for reader in self._readers)
        if own >= MAX_STREAMS_PER_KEY and not caller.is_operator:
            raise TooBusyError(f"{own} streams of live events are open with this key, which is the limit: close one")
        reader = _Reader(topics, caller)
        self._readers.add(reader)
        return EventStream(self._events(reader), on_end=lambda: self._close(reader))

    def stop(self) -> None:
        """End all streams."""
        self._is_stopping = True
        self._next_turn()

    def _close(self, reader: _Reader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            for task in (self._building, self._serializing):
                if task is not None:
                    task.cancel()
            self._building = self._serializing = None

    # --- readers ------------------------------------------------------------------------------------------------------

    async def _events(self, reader: _Reader) -> AsyncGenerator[bytes]:
        if self._building is None:
            self._frames.clear()
            self._failure = None
            self._building = asyncio.create_task(self._build_forever())
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        while not self._is_stopping:
            turn, failure = self._turn, self._failure
            for topic in reader.topics:
                event = self._news(reader, topic)
                if event is not None:
                    yield event
                    sent_at = clock()
            if failure is not None:
                yield failure
                return
            if clock() - sent_at >= HEARTBEAT_S:
                yield _ALIVE
                sent_at = clock()
            await turn.wait()

    def _news(self, reader: _Reader, topic: str) -> bytes | None:
        """The event that the reader does not have yet, if there is one."""
        if topic == "steps":
            return self._new_steps(reader)
        if topic == "requests":
            return self._new_requests(reader)
        frame = self._frames.get(topic)
        if frame is None or reader.versions.get(topic) == frame.version:
            return None
        reader.versions[topic] = frame.version
        return frame.event

    def _new_steps(self, reader: _Reader) -> bytes | None:
        known = reader.step
        if known not in self._steps:
            steps = self._engine.inspection.steps_since(-1 if known is None else known)[-_FIRST_STEPS:]
            event = data_event(json.dumps({"steps": steps}), "steps") if steps or known is None else None
            self._steps[known] = event, steps[-1]["n"] if steps else known
        event, last = self._steps[known]
        reader.step = -1 if last is None else last
        return event

    def _new_requests(self, reader: _Reader) -> bytes | None:
        known, last = reader.request, self._history.last_number
        if known == last:
            return None
        reader.request = last
        entries = self._history.numbered_since(known or 0, reader.caller, _FIRST_REQUESTS)
        if known is not None and not entries:
            return None
        return data_event(f'{{"requests": [{", ".join(entry.line() for entry in entries)}]}}', "requests")

    # --- the task -----------------------------------------------------------------------------------------------------

    async def _build_forever(self) -> None:
        try:
            known: object = None
            for turn in itertools.count():
                is_complete = self._build()
                state = self._state(turn)
                if state != known:
                    self._next_turn()
                known = state
                is_first = not is_complete and turn < _FIRST_PERIODS
                await asyncio.sleep(_FIRST_PERIOD_S if is_first else PERIOD_S)
        except HybridKVError as error:
            self._fail(status_of(error), str(error))
        except Exception as error:
            LOG.error("a bug", exc_info=error)
            self._fail(500, f"an error in the server, which its log tells more about: {type(error).__name__}")

    def _build(self) -> bool:
        """Make events of what is new. False: a snapshot that is wanted has not been made yet."""
        wanted = frozenset(topic for reader in self._readers for topic in reader.topics)
        self._engine.check_alive()
        self._engine.inspection.watch(wanted & _SNAPSHOTS)
        self._history.settle()
        memory, prefixes = (self._new(topic) if topic in wanted else None for topic in ("memory", "prefixes"))
        if memory is not None:
            self._frames["memory"] = _Frame(memory.version, data_event(json.dumps(memory.data), "memory"))
        if prefixes is not None and self._serializing is None:
            self._serializing = asyncio.create_task(self._add_prefixes(prefixes))
        return wanted & _SNAPSHOTS <= set(self._frames)

    def _state(self, turn: int) -> object:
        """Differs from the last one if readers may find something new, or have to look whether a heartbeat is due."""
        steps = self._engine.inspection.steps_since(self._last_step)
        self._last_step = steps[-1]["n"] if steps else self._last_step
        versions = [frame.version for frame in self._frames.values()]
        return versions, self._history.last_number, self._last_step, turn // _TURNS_PER_LOOK

    def _new(self, topic: str) -> Snapshot | None:
        """The engine's last snapshot, if there is no event of it yet."""
        frame, latest = self._frames.get(topic), self._engine.inspection.latest(topic)
        is_known = latest is None or (frame is not None and frame.version == latest.version)
        return None if is_known else latest

    async def _add_prefixes(self, snapshot: Snapshot) -> None:
        try:
            event = data_event(await self._serialize_prefixes(snapshot.data), "prefixes")
            self._frames["prefixes"] = _Frame(snapshot.version, event)
        finally:
            self._serializing = None
        self._next_turn()

    def _fail(self, status: int, message: str) -> None:
        """Tell all readers, and end their streams."""
        self._failure = data_event(error_body(status, message), "error")
        self._building = None
        self._next_turn()

    def _next_turn(self) -> None:
        self._steps.clear()
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()
