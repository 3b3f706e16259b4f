"""A second reader of stored caches, written from docs/store.md alone: it imports nothing of hybridkv.

`read(files, namespace, salt, tokens)` returns what is needed to resume after `tokens`. `files` is the directory of a
file store, or a mapping of the paths below its `hybridkv-v1` to bytes. All arrays are bytes (uint8).
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as checksum

Bytes = npt.NDArray[np.uint8]
Group = Mapping[str, Any]

HEAD = struct.Struct("<8sII16s32sdQIH")
ROW = struct.Struct("<QQQ")
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
LAYOUT_FIELDS = {"format", "type", "weights", "block_tokens", "stretch_tokens", "hidden", "groups"}
GROUP_FIELDS = {"role", "slices", "window", "chunk", "rows"}


class UnreadableError(Exception):
    """A file is not what the page describes, or a slice is missing."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise UnreadableError(what)


@dataclass
class Cache:
    """What a store has of a prefix."""

    kv: dict[tuple[int, str], tuple[int, Bytes]] = field(default_factory=dict)
    """By layer and part: the number of the first token, and [tokens, heads, bytes]."""
    states: dict[tuple[str, int], list[tuple[str, Bytes]]] = field(default_factory=dict)
    """By group and layer: each part's name and [length, bytes]."""


def read(
    files: Mapping[str, bytes] | Path,
    namespace: str,
    salt: Sequence[str],
    tokens: Sequence[int],
    taps: Sequence[int] = (),
) -> Cache:
    """What is needed to resume after `tokens`. `salt`: the salt, then extra keys. `taps`: layers, for hidden states."""
    if isinstance(files, Path):
        root = files / "hybridkv-v1"
        files = {str(path.relative_to(root)): path.read_bytes() for path in root.glob("*/**/*") if path.is_file()}
    about, cache, end = read_layout(files, namespace), Cache(), len(tokens)
    block, (hidden_size, hidden_type) = about["block_tokens"], about["hidden"]
    hidden = [["hidden", hidden_type, 1, [hidden_size]]]
    tapped = {f"tap{n}": {"role": "full", "slices": 1, "rows": [{"layers": [n], "parts": hidden}]} for n in taps}
    for name, group in {**about["groups"], **tapped}.items():
        spans = [(end - 1, end)] if group["role"] == "state" else spans_of(group, end, block, about["stretch_tokens"])
        for first, last in spans:
            found = whole(files, namespace, name, group["slices"], key_of(salt, tokens, last, block), last)
            layers = [(layer, run["parts"]) for run in group["rows"] for layer in run["layers"]]
            for (layer, parts), row in zip(layers, found, strict=True):
                sizes = [(part, length, SIZES[kind] * prod(inner)) for part, kind, length, inner in parts]
                if group["role"] == "state":
                    cache.states[name, layer] = state_of(row, sizes, group["slices"])
                else:
                    add_tokens(cache, layer, row, sizes, first, last - first)
    return cache


def read_layout(files: Mapping[str, bytes], namespace: str) -> dict[str, Any]:
    text = json.loads(files[f"about/{namespace}.json"])["layout"]
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    need(digest == namespace, f"namespace {namespace}: its layout has the digest {digest}")
    layout: dict[str, Any] = json.loads(text)
    need(layout.get("format") == 2, f"format {layout.get('format')} is not known")
    known(layout, LAYOUT_FIELDS)
    for group in layout["groups"].values():
        known(group, GROUP_FIELDS)
        need(group["role"] in ("full", "local", "state"), f"role {group['role']} is not known")
        for run in group["rows"]:
            known(run, {"layers", "parts"})
    return layout


def known(fields: Mapping[str, Any], names: set[str]) -> None:
    for name in fields:
        need(name in names, f"field {name} is not known")


def key_of(salt: Sequence[str], tokens: Sequence[int], end: int, block: int) -> bytes:
    if end == 0:
        texts = [text.encode() for text in salt]
        return hashlib.sha256(b"".join(struct.pack("<Q", len(text)) + text for text in texts)).digest()
    start = (end - 1) // (16 * block) * (16 * block)
    return hashlib.sha256(key_of(salt, tokens, start, block) + np.array(tokens[start:end], "<i4").tobytes()).digest()


def seen_from(group: Group, end: int) -> int:
    if "window" in group:
        return max(0, end - int(group["window"]) + 1)
    return end // int(group["chunk"]) * int(group["chunk"]) if "chunk" in group else 0


def spans_of(group: Group, end: int, block: int, stretch: int) -> list[tuple[int, int]]:
    """First token and end of each object that is needed to resume at `end`."""
    ends = [e for e in range(stretch, end, stretch) if e > seen_from(group, end)] + [end]
    spans = [(max((e - 1) // stretch * stretch, seen_from(group, e) // block * block), e) for e in ends]
    return [(first, e) for first, e in spans if first < e]


def whole(files: Mapping[str, bytes], namespace: str, group: str, slices: int, key: bytes, end: int) -> list[bytes]:
    """The rows of a group at one position, put together from slices of any ways."""
    pieces: dict[int, list[bytes]] = {}
    for ways in (n for n in range(1, slices + 1) if slices % n == 0):
        for number in range(ways):
            name, each = group if ways == 1 else f"{group}.{number}of{ways}", slices // ways
            path = f"objects/{namespace}/{name}/{key.hex()[:2]}/{key.hex()}"
            if path in files:
                rows = rows_of(files[path], (bytes.fromhex(namespace), name, key, end))
                for s in range(each):
                    cut = [row[s * len(row) // each : (s + 1) * len(row) // each] for row in rows]
                    need(pieces.setdefault(number * each + s, cut) == cut, f"{name} at {end}: two ways differ")
    need(len(pieces) == slices, f"{group} at {end}: {len(pieces)} of {slices} slices")
    return [b"".join(row) for row in zip(*(pieces[s] for s in range(slices)), strict=True)]


def rows_of(blob: bytes, name: tuple[bytes, str, bytes, int]) -> list[bytes]:
    """The rows of one object, all checked."""
    magic, version, size, namespace, key, _, position, count, letters = HEAD.unpack_from(blob)
    need(magic == b"hybridkv", f"magic {magic!r} is not known")
    need(version == 1, f"version {version} is not known")
    need(size == HEAD.size + letters + ROW.size * count + 8, f"{name}: a header of {size} bytes")
    need(checksum(blob[: size - 8]) == int.from_bytes(blob[size - 8 : size], "little"), f"{name}: header checksum")
    group = blob[HEAD.size : HEAD.size + letters].decode()
    need((namespace, group, key, position) == name, f"{name}: the header has the name {group} at {position}")
    rows = []
    for index in range(count):
        offset, length, expected = ROW.unpack_from(blob, HEAD.size + letters + ROW.size * index)
        need(offset == -(-size // 4096) * 4096, f"{name}: row {index} at {offset}")
        rows.append(blob[offset : offset + length])
        need(checksum(rows[-1]) == expected, f"{name}: checksum of row {index}")
        size = offset + length
    need(len(blob) == size, f"{name}: {len(blob)} bytes instead of {size}")
    return rows


def add_tokens(cache: Cache, layer: int, row: bytes, parts: list[tuple[str, int, int]], first: int, count: int) -> None:
    heads, at = parts[0][1], 0
    by_head = np.frombuffer(row, np.uint8).reshape(heads, count * sum(size for _, _, size in parts))
    for name, length, size in parts:
        need(length == heads, f"layer {layer}: {name} has {length} heads, not {heads}")
        part = by_head[:, at : at + count * size].reshape(heads, count, size).transpose(1, 0, 2)
        start, before = cache.kv.get((layer, name), (first, part[:0]))
        need(start + len(before) == first, f"layer {layer}: a gap before token {first}")
        cache.kv[layer, name] = start, np.concatenate([before, part])
        at += count * size


def state_of(row: bytes, parts: list[tuple[str, int, int]], slices: int) -> list[tuple[str, Bytes]]:
    by_slice = np.frombuffer(row, np.uint8).reshape(slices, sum(n // slices * size for _, n, size in parts))
    found, at = [], 0
    for name, length, size in parts:
        found.append((name, by_slice[:, at : at + length // slices * size].reshape(length, size)))
        at += length // slices * size
    return found
