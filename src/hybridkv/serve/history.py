"""The latest requests of a server and the records of their prompts, in bounded memory.

The engine's thread hands records over; everything else happens on the event loop.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hybridkv.engine import RequestRecord
from hybridkv.serve.access import Caller

DEFAULT_REQUESTS = 1000
MAX_TOKENS = 2 * 2**20
"""Most prompt tokens that are kept, all requests together."""
RUNNING = "running"
_LATE_S = 2.0
"""Time that an ended request waits for records before it is numbered without them."""
_SOURCES = ("memory", "store", "engine", "computed")


@dataclass(slots=True, eq=False)
class PromptEntry:
    """One prompt of a request. Its record takes the place of nothing, and JSON without token ids that of the record."""

    record: RequestRecord | None = None
    _json: dict[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        return self.record is not None or self._json is not None

    def to_json(self) -> dict[str, Any] | None:
        return self._json if self.record is None else self.record.to_json()

    def drop_ids(self) -> None:
        self._json, self.record = self.to_json(), None


@dataclass(slots=True, eq=False)
class Entry:
    """One HTTP request for text."""

    id: str
    """The id of the reply."""
    request_id: str
    """The header X-Request-Id."""
    owner: str
    path: str
    model: str
    prompt_tokens: int
    prompts: list[PromptEntry]
    cache_key: str | None = None
    """OpenAI's `prompt_cache_key`."""
    created: float = field(default_factory=time.time)
    outcome: str = RUNNING
    ended_at: float = 0.0
    number: int = 0
    """Requests are numbered from 1 as soon as they have ended and their records have come."""
    cached_line: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The whole record. Prompts that have not ended are None in it."""
        return {**self._head(), "prompts": [one.to_json() for one in self.prompts]}

    def summary(self) -> dict[str, Any]:
        prompts = [found for one in self.prompts if (found := one.to_json()) is not None]
        return {**self._head(), **_totals(prompts), "prompt_tokens": self.prompt_tokens}

    def line(self) -> str:
        """The summary as JSON. That of a numbered request is made once."""
        if self.cached_line is not None:
            return self.cached_line
        made = json.dumps(self.summary())
        if self.number:
            self.cached_line = made
        return made

    def _head(self) -> dict[str, Any]:
        return {
            "object": "hybridkv.request",
            "id": self.id,
            "request_id": self.request_id,
            "created": self.created,
            "path": self.path,
            "model": self.model,
            "cache_key": self.cache_key,
            "outcome": self.outcome,
        }


class History:
    """Requests that run, and the latest that have ended. Ended ones beyond `max_requests` are forgotten; before
    that, the oldest lose their token ids if there are more than `max_tokens`."""

    def __init__(self, max_requests: int = DEFAULT_REQUESTS, max_tokens: int = MAX_TOKENS) -> None:
        """`max_requests`: 0 keeps nothing, running requests included."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._running: dict[str, Entry] = {}
        self._ended: dict[str, Entry] = {}
        """The one that ended first comes first."""
        self._late: dict[str, Entry] = {}
        """Ended requests that lack the record of a prompt: the engine notices an abort after its next step."""
        self._with_ids: dict[tuple[str, int], int] = {}
        """Number of tokens by request and prompt, the oldest first."""
        self._num_tokens = 0
        self._numbered: deque[Entry] = deque(maxlen=max_requests)
        self._num_numbered = 0
        self._arrived: deque[RequestRecord] = deque()

    @property
    def num_requests(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def last_number(self) -> int:
        """The highest number of a request."""
        return self._num_numbered

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def receive(self, record: RequestRecord) -> None:
        """Take the record of a prompt. Called on the engine's thread. Records of other requests are ignored."""
        request = record.request_id.rpartition("-")[0]
        if request in self._running or request in self._late:
            self._arrived.append(record)

    def begin(self, entry: Entry) -> None:
        if self._max_requests:
            self._running[entry.id] = entry

    def end(self, request: str, outcome: str) -> None:
        """A request has been answered, or not. Does nothing for one that is not known."""
        entry = self._running.get(request)
        if entry is None:
            return
        entry.outcome, entry.ended_at = outcome, time.monotonic()
        self._late[request] = entry  # before it leaves the running ones: its last record may come just now
        del self._running[request]
        self._ended[request] = entry
        self.settle()
        while len(self._ended) > self._max_requests:
            self._forget(next(iter(self._ended)))

    def settle(self) -> None:
        """Put records that have come into their requests."""
        while self._arrived:
            record = self._arrived.popleft()
            request, _, number = record.request_id.rpartition("-")
            entry = self._running.get(request) or self._late.get(request)
            if entry is not None:
                self._put(entry, int(number), record)
        latest = time.monotonic() - _LATE_S
        for entry in list(self._late.values()):
            is_whole = all(one.has_ended for one in entry.prompts)
            if is_whole or (not entry.number and entry.ended_at < latest):
                self._give_number(entry)
            if is_whole:
                del self._late[entry.id]

    def latest(self, caller: Caller, limit: int) -> list[Entry]:
        """Requests that the caller may see, the newest first."""
        self.settle()
        seen = [entry for entry in self._all() if caller.may_see(entry.owner)]
        return sorted(seen, key=lambda entry: entry.created, reverse=True)[:limit]

    def find(self, name: str, caller: Caller) -> Entry | None:
        """The request with this id, or the newest with this X-Request-Id, if the caller may see it."""
        self.settle()
        entry = self._running.get(name) or self._ended.get(name)
        if entry is not None and caller.may_see(entry.owner):
            return entry
        return next((one for one in self.latest(caller, self.num_requests) if one.request_id == name), None)

    def numbered_since(self, number: int, caller: Caller, limit: int) -> list[Entry]:
        """The last requests after this number that the caller may see, in that order."""
        found: list[Entry] = []
        for entry in reversed(self._numbered):
            if entry.number <= number or len(found) == limit:
                break
            if caller.may_see(entry.owner):
                found.append(entry)
        return found[::-1]

    def _all(self) -> Iterator[Entry]:
        yield from self._running.values()
        yield from self._ended.values()

    def _put(self, entry: Entry, number: int, record: RequestRecord) -> None:
        if entry.prompts[number].has_ended:
            return
        entry.prompts[number].record, entry.cached_line = record, None
        self._with_ids[entry.id, number] = record.prompt.num_tokens
        self._num_tokens += record.prompt.num_tokens
        while self._num_tokens > self._max_tokens:
            self._drop_ids(*next(iter(self._with_ids)))

    def _give_number(self, entry: Entry) -> None:
        if not entry.number:
            self._num_numbered += 1
            entry.number = self._num_numbered
            self._numbered.append(entry)

    def _drop_ids(self, request: str, number: int) -> None:
        self._num_tokens -= self._with_ids.pop((request, number))
        entry = self._running.get(request) or self._ended[request]
        entry.prompts[number].drop_ids()

    def _forget(self, request: str) -> None:
        entry = self._ended[request]
        for number in range(len(entry.prompts)):
            self._num_tokens -= self._with_ids.pop((request, number), 0)
        self._late.pop(request, None)
        del self._ended[request]


def _totals(prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the prompts of a request have together."""
    sources = dict.fromkeys(_SOURCES, 0)
    for span in (span for one in prompts for span in one["spans"]):
        sources[span["source"]] += span["end"] - span["start"]
    missing = (_missing(one) for one in prompts)
    why = (_first_sentence(reason["text"]) for one in prompts for reason in one["why"])
    return {
        "cached_tokens": sum(one["cached_tokens"] for one in prompts),
        "reply_tokens": sum(one["reply_tokens"] for one in prompts),
        "ttft_s": max((one["metrics"]["ttft_s"] for one in prompts), default=None),
        "missing": next((one for one in missing if one), None),
        "why": next(why, None),
        "by_source": sources,
    }


def _missing(prompt: dict[str, Any]) -> str | None:
    """What the lookup lacked, or the main reason where it says more: a lookup cannot tell evicted from never seen."""
    code: str = prompt["why"][0]["code"] if prompt["why"] else ""
    if code == "evicted" or code.endswith("_evicted"):
        return "evicted"
    if code == "too_short":
        return "below_block"
    found: str | None = prompt["lookup"]["missing"] if prompt["lookup"] is not None else None
    return found


def _first_sentence(text: str) -> str:
    sentence, dot, _ = text.partition(". ")
    return sentence + dot.strip()
