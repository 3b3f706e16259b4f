"""The index of a store on the server: what there is, how large it is, when it was used. See `keys` for its layout.

The server may evict objects on its own, and a writer may be killed between an object and its entry. So entries without
objects and objects without entries exist for a while: `prune` removes the former, `enter` repairs the latter.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock

from hybridkv.errors import StoreFault
from hybridkv.store.blobs import Usage
from hybridkv.store.eviction import Evictable
from hybridkv.store.names import ObjectName
from hybridkv.store.store import Stored
from hybridkv.store.valkey import scripts
from hybridkv.store.valkey.exchange import Answer, Command, Node
from hybridkv.store.valkey.keys import (
    INDEX,
    LOCK,
    SHARDS,
    Worth,
    decode_worth,
    encode_worth,
    name_of_field,
    name_of_key,
    object_key,
    pattern,
    shard_of,
    slot_of,
)
from hybridkv.store.valkey.servers import Servers
from hybridkv.store.valkey.wire import Reply, ServerError, encode

_MOST_NAMES = 500
"""Names in one script, which blocks the server while it runs."""
_PAGE = 1000
_ENTRY_BYTES = 512
"""More than a name with its time and worth takes in an answer."""
_LOCK_MS = 30_000


def reply(servers: Servers, answer: Answer) -> Reply:
    """The answer. Raises StoreFault if it is an error."""
    if isinstance(answer, StoreFault):
        raise answer
    if isinstance(answer, ServerError):
        raise StoreFault(f"{servers.label}: the server answers {str(answer)!r}")
    return answer


def replies(servers: Servers, answers: Sequence[Answer]) -> list[Reply]:
    """The answers; None for those of servers that fail. Raises StoreFault if all fail, or if an answer is an error."""
    faults = [answer for answer in answers if isinstance(answer, StoreFault)]
    if faults and (len(faults) == len(answers) or not servers.is_cluster):
        raise faults[0]
    return [None if isinstance(answer, StoreFault) else reply(servers, answer) for answer in answers]


class Index:
    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._lock = Lock()
        self._usage: dict[str, Usage] = {}
        """Last known, by shard: a server that fails keeps what it had. A single server has it all in the first."""

    def enter(self, name: ObjectName, value: float | None, position: int | None, now: float) -> Command:
        """Enters an object that exists."""
        shard = INDEX[shard_of(name)]
        keys = (object_key(name), shard.meta, shard.used, shard.usage)
        arguments = (str(name), encode_worth(value, position), repr(now))
        return Command(encode("EVAL", scripts.INDEX, 4, *keys, *arguments), shard.slot)

    def remove(self, names: Iterable[ObjectName], latest: Mapping[ObjectName, float] | None = None) -> int:
        """Delete objects and their entries, in one round trip. Returns how many objects existed.

        `latest`: objects that were used after the time given here are kept.
        """
        commands = []
        for shard, some in _by_shard(names):
            times = ["" if latest is None else repr(latest[name]) for name in some]
            commands.append(_script(scripts.REMOVE, shard, some, times))
        return self._sum(commands)

    def prune(self) -> int:
        """Remove entries of objects that do not exist, and count again. Returns how many entries were removed."""
        stale = 0
        for digits in SHARDS:
            shard = INDEX[digits]
            for page in self._pages(("HSCAN", shard.meta), (), shard.slot):
                fields = [field for field in page[::2] if isinstance(field, bytes)]
                found = [name for name in map(name_of_field, fields) if name is not None and shard_of(name) == digits]
                stale += self._sum([_script(scripts.PRUNE, digits, found, ())] if found else [])
        count = [Command(encode("EVAL", scripts.RECOUNT, 2, one.meta, one.usage), one.slot) for one in INDEX.values()]
        replies(self._servers, self._servers.run(count))
        return stale

    def touch(self, names: Iterable[ObjectName], now: float) -> None:
        commands = []
        for digits, some in _by_shard(names):
            pairs = [word for name in some for word in (repr(now), str(name))]
            shard = INDEX[digits]
            commands.append(Command(encode("ZADD", shard.used, "XX", "GT", *pairs), shard.slot))
        replies(self._servers, self._servers.run(commands))

    def usage_commands(self) -> list[Command]:
        return _USAGE if self._servers.is_cluster else _USAGE_AT_ONCE

    def usage(self, answers: Sequence[Answer]) -> Usage:
        """The sum of all shards, from the answers to `usage_commands`."""
        found = replies(self._servers, answers)
        with self._lock:
            for shard, one in zip(SHARDS, found, strict=False):
                if isinstance(one, list):
                    self._usage[shard] = Usage(*(_count(number) for number in one[:2]))
            return Usage(*(sum(column) for column in zip(*self._usage.values(), strict=True)))

    def oldest(self, nbytes: int, usage: Usage) -> list[Evictable]:
        """The least recently used objects of each shard: several times the `nbytes` to free, and some more."""
        mean = max(1, usage.nbytes // max(1, usage.objects))
        count = min(16 + math.ceil(8 * max(0, nbytes) / mean / len(SHARDS)), 4 * _MOST_NAMES)
        commands = [
            Command(encode("EVAL", scripts.OLDEST, 2, one.meta, one.used, count), one.slot, _ENTRY_BYTES * (count + 1))
            for one in INDEX.values()
        ]
        found = []
        for answer in replies(self._servers, self._servers.run(commands)):
            fields = answer if isinstance(answer, list) else []
            for field, score, entry in zip(fields[::3], fields[1::3], fields[2::3], strict=False):
                name = name_of_field(field) if isinstance(field, bytes) else None
                worth = decode_worth(entry) if isinstance(entry, bytes) else Worth(0, None, None)
                if name is not None:
                    found.append(Evictable(name, worth.nbytes, _time(score), worth.value, worth.position or 0))
        return found

    def objects(self, namespace: str | None, group: str | None) -> Iterator[tuple[Stored, bool]]:
        """All objects that exist, and whether each has an entry."""
        seen: set[int] = set()
        for node in self._servers.nodes():
            for page in self._pages(("SCAN",), ("MATCH", pattern(namespace, group)), node):
                keys = {key for key in page if isinstance(key, bytes) and hash(key) not in seen}
                seen |= set(map(hash, keys))
                names = [name for name in map(name_of_key, sorted(keys)) if name is not None]
                yield from self._described(
                    [one for one in names if namespace in (None, one.namespace) and group in (None, one.group)]
                )

    def _described(self, names: Sequence[ObjectName]) -> Iterator[tuple[Stored, bool]]:
        commands = []
        for name in names:
            shard, field = INDEX[shard_of(name)], str(name)
            commands.append(Command(encode("STRLEN", object_key(name)), shard.slot))
            commands.append(Command(encode("HGET", shard.meta, field), shard.slot))
            commands.append(Command(encode("ZSCORE", shard.used, field), shard.slot))
        answers = self._servers.run(commands)
        for name, nbytes, entry, score in zip(names, answers[::3], answers[1::3], answers[2::3], strict=True):
            if isinstance(nbytes, ServerError) and nbytes.code == "WRONGTYPE":
                nbytes = 0
            elif reply(self._servers, nbytes) == 0 or not isinstance(nbytes, int):
                continue  # deleted meanwhile
            raw, used = reply(self._servers, entry), reply(self._servers, score)
            worth = decode_worth(raw) if isinstance(raw, bytes) else Worth(0, None, None)
            is_entered = isinstance(raw, bytes) and used is not None and worth.nbytes == nbytes
            yield Stored(name, nbytes, _time(used), worth.value, worth.position), is_entered

    def lock(self) -> str | None:
        """Take the eviction lock. None: another process evicts. A killed holder loses the lock after half a minute."""
        token = secrets.token_hex(8)
        command = Command(encode("EVAL", scripts.LOCK, 1, LOCK, token, _LOCK_MS), slot_of(LOCK))
        return token if reply(self._servers, self._servers.run([command], again=False)[0]) == 1 else None

    def unlock(self, token: str) -> None:
        self._servers.run([Command(encode("EVAL", scripts.UNLOCK, 1, LOCK, token), slot_of(LOCK))])

    def _sum(self, commands: Sequence[Command]) -> int:
        found = replies(self._servers, self._servers.run(commands, again=False) if commands else [])
        return sum(count for count in found if isinstance(count, int))

    def _pages(self, start: tuple[str, ...], end: tuple[str, ...], target: int | Node) -> Iterator[list[Reply]]:
        """The pages of a scan. Items that are there all the time are on one page at least."""
        cursor: Reply = b"0"
        while isinstance(cursor, bytes):
            command = Command(encode(*start, cursor, *end, "COUNT", _PAGE), target, 64 * _PAGE * _ENTRY_BYTES)
            answer = reply(self._servers, self._servers.run([command])[0])
            if not isinstance(answer, list) or len(answer) != 2:
                raise StoreFault(f"{self._servers.label}: an answer to {start[0]} without a cursor")
            cursor, page = answer
            if isinstance(page, list):
                yield page
            if cursor == b"0":
                return


def _by_shard(names: Iterable[ObjectName]) -> Iterator[tuple[str, list[ObjectName]]]:
    shards: defaultdict[str, list[ObjectName]] = defaultdict(list)
    for name in dict.fromkeys(names):
        shards[shard_of(name)].append(name)
    for shard, found in shards.items():
        for begin in range(0, len(found), _MOST_NAMES):
            yield shard, found[begin : begin + _MOST_NAMES]


def _script(script: str, digits: str, names: Sequence[ObjectName], more: Sequence[str]) -> Command:
    shard = INDEX[digits]
    keys = [shard.meta, shard.used, shard.usage, *map(object_key, names)]
    return Command(encode("EVAL", script, len(keys), *keys, *map(str, names), *more), shard.slot)


def _count(number: Reply) -> int:
    return int(number) if isinstance(number, bytes) and number.isdigit() and len(number) < 19 else 0


def _time(score: Reply) -> float:
    """A score of the sorted set of uses. 0 if it is none."""
    try:
        found = float(score) if isinstance(score, bytes) else 0.0
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0


_USAGE = [Command(encode("HMGET", one.usage, "objects", "nbytes"), one.slot) for one in INDEX.values()]
_USAGE_AT_ONCE = [Command(encode("EVAL", scripts.USAGE, len(SHARDS), *(one.usage for one in INDEX.values())), 0)]
