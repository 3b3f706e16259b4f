"""Blobs on Valkey or Redis: one string each. See `keys` for the layout on the server."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hybridkv.errors import CorruptObject, MissingObject, StoreError, StoreFault, StoreInputError, UnknownFormat
from hybridkv.store.blob_store import BlobStore
from hybridkv.store.blobs import Blob, Blobs, PendingBlob, Usage, header_of
from hybridkv.store.descriptions import decode_description, encode_description
from hybridkv.store.names import ObjectName, is_namespace
from hybridkv.store.store import Leftovers, Stored
from hybridkv.store.valkey import scripts
from hybridkv.store.valkey.exchange import Answer, Command
from hybridkv.store.valkey.index import Index, replies, reply
from hybridkv.store.valkey.keys import ABOUT, MOST_VALUE_BYTES, object_key, shard_of, slot_of
from hybridkv.store.valkey.room import Room
from hybridkv.store.valkey.servers import Servers
from hybridkv.store.valkey.transfer import FIRST_BYTES, PendingValkeyBlob, ValkeyBlob, exist, slot
from hybridkv.store.valkey.wire import Reply, ServerError, encode

_ABOUT_BYTES = 64 << 20

logger = logging.getLogger("hybridkv.store")


class ValkeyBlobs(Blobs):
    opens_together = 64

    def __init__(self, servers: Servers, size: int) -> None:
        if size < 1:
            raise StoreInputError(f"a store of {size} bytes: give it a size such as 200GiB, or none")
        self.size = size
        self.servers = servers
        self.index = Index(servers)
        self.room = Room(servers, self.index, size)
        self._is_too_large_logged = False

    @property
    def round_trips(self) -> int:  # type: ignore[override]
        return self.servers.trips.count

    @property
    def evicted(self) -> int:  # type: ignore[override]
        return self.room.evicted

    @property
    def dropped(self) -> int:  # type: ignore[override]
        return self.room.dropped

    def lookup(self, names: Sequence[ObjectName]) -> list[bool]:
        if not names:
            return []
        shards: defaultdict[str, list[int]] = defaultdict(list)
        for number, name in enumerate(names):
            shards[shard_of(name)].append(number)
        commands = [exist([names[number] for number in numbers], shard) for shard, numbers in shards.items()]
        found = [False] * len(names)
        for numbers, answer in zip(shards.values(), replies(self.servers, self.servers.run(commands)), strict=True):
            for number, flag in zip(numbers, answer if isinstance(answer, list) else (), strict=False):
                found[number] = flag == 1
        return found

    def open(self, name: ObjectName) -> Blob:
        (found,) = self.open_all([name])
        if isinstance(found, StoreError):
            raise found
        return found

    def open_all(self, names: Sequence[ObjectName]) -> list[Blob | StoreError]:
        commands = []
        for name in names:
            key = object_key(name)
            commands.append(Command(encode("STRLEN", key), slot(name)))
            commands.append(Command(encode("GETRANGE", key, 0, FIRST_BYTES - 1), slot(name), FIRST_BYTES + 64))
        answers = self.servers.run(commands)
        found = [self._opened(*one) for one in zip(names, answers[::2], answers[1::2], strict=True)]
        return self._told_apart(names, found)

    def _opened(self, name: ObjectName, nbytes: Answer, first: Answer) -> Blob | StoreError:  # type: ignore[override]
        try:
            if isinstance(nbytes, ServerError) and nbytes.code == "WRONGTYPE":
                return ValkeyBlob(self.servers, name, 0, b"")
            length, data = self.reply(name, nbytes), self.reply(name, first)
            if not isinstance(length, int) or length < 0 or not isinstance(data, bytes):
                raise StoreFault(f"{name}: {self.servers.label} answers with other types than asked for")
            if len(data) != min(length, FIRST_BYTES):
                raise MissingObject(f"{name}: it was deleted or written again while it was opened")
            if not length:
                raise MissingObject(f"{name}: not in {self.servers.label}")
            return ValkeyBlob(self.servers, name, length, data)
        except StoreError as error:
            return error

    def _told_apart(self, names: Sequence[ObjectName], found: list[Blob | StoreError]) -> list[Blob | StoreError]:
        """An object of 0 bytes is corrupt, not missing. The server answers the same for both at first."""
        missing = [number for number, one in enumerate(found) if isinstance(one, MissingObject)]
        if missing:
            keys = [(object_key(names[number]), slot(names[number])) for number in missing]
            commands = [Command(encode("EVAL", scripts.IS_EMPTY, 1, key), at) for key, at in keys]
            for number, answer in zip(missing, self.servers.run(commands), strict=True):
                if answer == 1:
                    found[number] = ValkeyBlob(self.servers, names[number], 0, b"")
        return found

    def reply(self, name: ObjectName, answer: Answer) -> Reply:
        """The answer. An object on a server that fails, while others of the cluster serve, is missing."""
        if isinstance(answer, StoreFault) and self.servers.others_serve:
            raise MissingObject(f"{name}: {answer}")
        return reply(self.servers, answer)

    def begin(self, name: ObjectName, nbytes: int, value: float, position: int) -> PendingBlob | None:
        if nbytes > MOST_VALUE_BYTES:
            self._drop_too_large(name, nbytes)
            return None
        commands = [Command(encode("EXISTS", object_key(name)), slot(name)), *self.room.commands(nbytes)]
        answers = self.servers.run(commands)
        try:
            exists = self.reply(name, answers[0])
        except MissingObject:  # its server fails
            self.room.drop()
            return None
        if exists or not self.room.reserve(nbytes, answers[1:], self.on_evict):
            return None
        try:
            return PendingValkeyBlob(self.servers, self.index, self.room, name, nbytes, value, position)
        except MemoryError:
            self.room.give_back(nbytes)
            raise StoreFault(f"{name}: no {nbytes:,} bytes of memory left") from None

    def _drop_too_large(self, name: ObjectName, nbytes: int) -> None:
        self.room.drop()
        if not self._is_too_large_logged:
            self._is_too_large_logged = True
            sizes = f"an object of {nbytes:,} bytes, and the server takes {MOST_VALUE_BYTES:,} at most"
            logger.warning("%s: %s; it is not kept, nor are others as large", name, sizes)

    def delete(self, names: Sequence[ObjectName]) -> int:
        return self.index.remove(names) if names else 0

    def objects(self, namespace: str | None, group: str | None) -> Iterator[Stored]:
        for stored, is_entered in self.index.objects(namespace, group):
            yield stored if is_entered else self._enter(stored)

    def _enter(self, stored: Stored) -> Stored:
        """Enter an object that has no entry: its writer was killed, or the server has evicted the index."""
        value = position = None
        try:
            blob = self.open(stored.name)
            value, position = header_of(stored.name, blob)[1:3]
        except (MissingObject, CorruptObject, UnknownFormat):
            pass  # what cannot be read is entered without a value, so that eviction finds it
        now = time.time()
        reply(self.servers, self.servers.run([self.index.enter(stored.name, value, position, now)])[0])
        return stored._replace(used_at=now, value=value, position=position)

    def touch(self, names: Sequence[ObjectName]) -> None:
        if names:
            self.index.touch(names, time.time())

    def describe(self, namespace: str, info: Mapping[str, str]) -> None:
        command = Command(encode("HSET", ABOUT, namespace, encode_description(info)), slot_of(ABOUT))
        reply(self.servers, self.servers.run([command])[0])

    def descriptions(self) -> dict[str, dict[str, str]]:
        command = Command(encode("HGETALL", ABOUT), slot_of(ABOUT), _ABOUT_BYTES)
        answer = reply(self.servers, self.servers.run([command])[0])
        raw = answer if isinstance(answer, list) else []
        found = {}
        for key, data in zip(raw[::2], raw[1::2], strict=False):
            namespace = key.decode("ascii", "replace") if isinstance(key, bytes) else ""
            info = decode_description(data) if isinstance(data, bytes) else None
            if info is not None and is_namespace(namespace):
                found[namespace] = info
        return found

    def usage(self) -> Usage:
        return self.room.usage()

    def collect(self) -> Leftovers:
        """Nothing is ever left to remove; the index is made right."""
        for _ in self.objects(None, None):
            pass
        self.index.prune()
        return Leftovers(0, 0)

    def shrink(self, nbytes: int) -> int:
        return self.room.shrink(nbytes, self.on_evict)

    def close(self) -> None:
        self.servers.close()


class ValkeyStore(BlobStore):
    """Objects on a Valkey or Redis server, or a cluster, shared with other processes and hosts."""

    def __init__(self, servers: Servers, size: int) -> None:
        super().__init__(ValkeyBlobs(servers, size))
