"""A second reader of stored caches, written from docs/store.md alone: it imports nothing of hybridkv.

`read(files, namespace, salt, tokens)` returns what is needed to resume after `tokens`. `files` is the directory of a
file store, or a mapping of the paths below its `hybridkv-v1` to bytes. All arrays are bytes (uint8).
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

type Bytes = npt.NDArray[np.uint8]
type Files = Mapping[str, bytes]

HEAD = struct.Struct("<8sII16s32sdQIH")
ROW = struct.Struct("<QQQ")
PAGE = 4096
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
KNOWN = {
    "layout": {"format", "type", "weights", "block_tokens", "stretch_tokens", "hidden", "groups"},
    "group": {"role", "slices", "window", "chunk", "rows"},
    "rows": {"layers", "parts"},
}


class UnreadableError(Exception):
    """A file is not what the page describes, or an object is missing."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise UnreadableError(what)


@dataclass
class Cache:
    """Bytes by layer and part. KV: [tokens, heads, bytes], with the number of its first token. States: [length, bytes]."""

    kv: dict[tuple[int, str], tuple[int, Bytes]] = field(default_factory=dict)
    states: dict[tuple[int, str], Bytes] = field(default_factory=dict)


class Directory(Mapping[str, bytes]):
    def __init__(self, root: Path) -> None:
        self.root = root / "hybridkv-v1"

    def __getitem__(self, path: str) -> bytes:
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            raise KeyError(path) from None

    def __iter__(self) -> Any:
        return (str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def layout(files: Files, namespace: str) -> dict[str, Any]:
    text = json.loads(files[f"about/{namespace}.json"])["layout"]
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    need(digest == namespace, f"namespace {namespace}: its layout has the digest {digest}")
    found: dict[str, Any] = json.loads(text)
    need(found.get("format") == 2, f"format {found.get('format')} is not known")
    known("layout", found)
    for group in found["groups"].values():
        known("group", group)
        need(group["role"] in ("full", "local", "state"), f"role {group['role']} is not known")
        for rows in group["rows"]:
            known("rows", rows)
    return found


def known(what: Literal["layout", "group", "rows"], fields: Iterable[str]) -> None:
    for name in fields:
        need(name in KNOWN[what], f"{what}: field {name} is not known")


def key(salt: Sequence[str], tokens: Sequence[int], end: int, block_tokens: int) -> bytes:
    if end == 0:
        parts = [text.encode() for text in salt]
        return hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()
    chain = 16 * block_tokens
    start = (end - 1) // chain * chain
    before = key(salt, tokens, start, block_tokens)
    return hashlib.sha256(before + np.asarray(tokens[start:end], "<i4").tobytes()).digest()


def rows(blob: bytes, namespace: str, group: str, name: bytes, end: int) -> list[bytes]:
    """The rows of one object, checked."""
    magic, version, size, space, own, _, position, count, letters = HEAD.unpack_from(blob)
    need(magic == b"hybridkv", f"magic {magic!r} is not known")
    need(version == 1, f"version {version} is not known")
    need(size == HEAD.size + letters + ROW.size * count + 8, f"a header of {size} bytes")
    need(xxhash.xxh3_64_intdigest(blob[: size - 8]) == int.from_bytes(blob[size - 8 : size], "little"), "header")
    named = blob[HEAD.size : HEAD.size + letters].decode()
    need((space.hex(), named, own, position) == (namespace, group, name, end), f"{named} at {position} is not {group}")
    result = []
    for index in range(count):
        offset, length, checksum = ROW.unpack_from(blob, HEAD.size + letters + ROW.size * index)
        need(offset == -(-size // PAGE) * PAGE, f"row {index} at {offset}")
        result.append(blob[offset : offset + length])
        size = offset + length
        need(xxhash.xxh3_64_intdigest(result[-1]) == checksum and len(blob) >= size, f"row {index}: checksum")
    need(len(blob) == size, f"{len(blob)} bytes instead of {size}")
    return result


def whole(files: Files, namespace: str, group: str, slices: int, name: bytes, end: int) -> list[bytes]:
    """The rows of a group at one position, put together from slices of any way."""
    pieces: dict[int, list[bytes]] = {}
    for ways in (n for n in range(1, slices + 1) if slices % n == 0):
        for index in range(ways):
            full = group if ways == 1 else f"{group}.{index}of{ways}"
            blob = files.get(f"objects/{namespace}/{full}/{name.hex()[:2]}/{name.hex()}")
            if blob is not None:
                each = slices // ways
                found = rows(blob, namespace, full, name, end)
                need(all(len(row) % each == 0 for row in found), f"{full}: its rows have no {each} slices")
                for s in range(each):
                    cut = [row[s * len(row) // each : (s + 1) * len(row) // each] for row in found]
                    need(pieces.setdefault(index * each + s, cut) == cut, f"{full} at {end}: ways differ")
    need(len(pieces) == slices, f"{group} at {end}: {len(pieces)} of {slices} slices")
    return [b"".join(row) for row in zip(*(pieces[s] for s in range(slices)), strict=True)]


def seen(group: Mapping[str, Any], end: int) -> int:
    if "window" in group:
        return max(0, end - int(group["window"]) + 1)
    return end // int(group["chunk"]) * int(group["chunk"]) if "chunk" in group else 0


def spans(group: Mapping[str, Any], end: int, block: int, stretch: int) -> list[tuple[int, int]]:
    """First token and end of each object that position `end` needs."""
    ends = [e for e in range(stretch, end, stretch) if e > seen(group, end)] + [end]
    first = [max((e - 1) // stretch * stretch, seen(group, e) // block * block) for e in ends]
    return [(f, e) for f, e in zip(first, ends, strict=True) if f < e]


def layers(group: Mapping[str, Any]) -> list[tuple[int, list[tuple[str, int, int]]]]:
    """Each row's layer, and name, length and bytes of an element of each of its parts."""
    found = []
    for run in group["rows"]:
        parts = [(name, length, SIZES[kind] * prod(inner)) for name, kind, length, inner in run["parts"]]
        found += [(layer, parts) for layer in run["layers"]]
    return found


def read(files: Files | Path, namespace: str, salt: Sequence[str], tokens: Sequence[int]) -> Cache:
    """What is needed to resume after `tokens`. `salt`: the salt and the extra keys."""
    files = Directory(files) if isinstance(files, Path) else files
    about, cache, end = layout(files, namespace), Cache(), len(tokens)
    block, stretch = about["block_tokens"], about["stretch_tokens"]
    for name, group in about["groups"].items():
        token = group["role"] != "state"
        for first, last in spans(group, end, block, stretch) if token else [(end - 1, end)]:
            found = whole(files, namespace, name, group["slices"], key(salt, tokens, last, block), last)
            for (layer, parts), row in zip(layers(group), found, strict=True):
                if token:
                    add_tokens(cache, layer, parts, np.frombuffer(row, np.uint8), first, last - first)
                else:
                    add_state(cache, layer, parts, np.frombuffer(row, np.uint8), group["slices"])
    return cache


def add_tokens(cache: Cache, layer: int, parts: Any, row: Bytes, first: int, count: int) -> None:
    heads = parts[0][1]
    need(all(length == heads for _, length, _ in parts), f"layer {layer}: parts with different numbers of heads")
    at, by_head = 0, row.reshape(heads, -1)
    for name, _, size in parts:
        part = by_head[:, at : at + count * size].reshape(heads, count, size).transpose(1, 0, 2)
        start, before = cache.kv.get((layer, name), (first, part[:0]))
        cache.kv[layer, name] = start, np.concatenate([before, part])
        at += count * size
    need(at == by_head.shape[1], f"layer {layer}: {by_head.shape[1]} bytes of a head instead of {at}")


def add_state(cache: Cache, layer: int, parts: Any, row: Bytes, slices: int) -> None:
    at, by_slice = 0, row.reshape(slices, -1)
    for name, length, size in parts:
        part = by_slice[:, at : at + length // slices * size]
        cache.states[layer, name] = part.reshape(length, size)
        at += length // slices * size
    need(at == by_slice.shape[1], f"layer {layer}: {by_slice.shape[1]} bytes of a slice instead of {at}")


def hidden(files: Files | Path, namespace: str, salt: Sequence[str], tokens: Sequence[int], layer: int) -> Bytes:
    """The hidden states [tokens, bytes] after a layer."""
    files = Directory(files) if isinstance(files, Path) else files
    about = layout(files, namespace)
    size, kind = about["hidden"]
    found = []
    for first, last in spans({}, len(tokens), about["block_tokens"], about["stretch_tokens"]):
        name = key(salt, tokens, last, about["block_tokens"])
        (row,) = whole(files, namespace, f"tap{layer}", 1, name, last)
        found.append(np.frombuffer(row, np.uint8).reshape(last - first, size * SIZES[kind]))
    return np.concatenate(found)
