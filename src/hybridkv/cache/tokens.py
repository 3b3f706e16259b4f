"""Tokens as bytes, four a token, so that comparing prefixes is one memcmp; what they are looked up under; and the names
of blocks outside."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.errors import InputError, RequestError

TokenIds = Sequence[int] | bytes | bytearray | npt.NDArray[np.int32]

TOKEN_BYTES = 4
ANCHOR_BLOCKS = 16
_structs: dict[int, struct.Struct] = {}


def pack_tokens(tokens: TokenIds) -> bytes:
    """Token ids as little-endian int32. An int32 array or packed bytes are taken as they are; lists cost more."""
    if isinstance(tokens, (bytes, bytearray)):
        if len(tokens) % TOKEN_BYTES:
            raise InputError(f"{len(tokens)} bytes of tokens: packed tokens take {TOKEN_BYTES} bytes each")
        return bytes(tokens)
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.dtype("<i4") or tokens.ndim != 1:
            raise InputError(f"tokens of dtype {tokens.dtype} and shape {tokens.shape}: pass one row of int32")
        return tokens.tobytes()
    count = len(tokens)
    if count == 1:  # what decoding samples
        only: object = tokens[0]
        if type(only) is int and 0 <= only < 2**31:
            return only.to_bytes(TOKEN_BYTES, "little")
    packer = _structs.get(count)
    if packer is None:
        if len(_structs) > 4096:
            _structs.clear()
        packer = _structs[count] = struct.Struct(f"<{count}i")
    try:
        return packer.pack(*tokens)
    except struct.error as error:
        raise InputError(f"token ids must be integers that fit into 32 bits: {error}") from None


class LookupKey(NamedTuple):
    """What a request's tokens are looked up under, in the index and in stores. Made by `lookup_key`."""

    root: bytes
    """Separates tenants, adapters and media: different roots never meet, in the tree or in block names."""
    taps: tuple[str, ...]
    """Groups of tapped layers that the request needs too."""


def lookup_key(salt: str = "", extra_keys: Sequence[str] = (), taps: Sequence[str] = ()) -> LookupKey:
    """A request's key. `salt`: its tenant. `extra_keys`: its adapter, its media. `taps`: tapped layers by group."""
    try:
        root = _root_key(salt, tuple(extra_keys))
    except (AttributeError, TypeError, UnicodeEncodeError):
        raise RequestError("a salt or an extra key that is no text: pass strings of whole characters") from None
    return LookupKey(root, tuple(taps))


@lru_cache(maxsize=1024)
def _root_key(salt: str, extra_keys: tuple[str, ...]) -> bytes:
    digest = sha256()
    for text in (salt, *extra_keys):
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


PLAIN_KEY = lookup_key()
"""No salt, no extra keys, no taps."""


def block_keys(anchor: bytes, tokens: bytes | bytearray, first: int, last: int, block_bytes: int) -> list[bytes]:
    """The names of blocks [first, last) of a prompt: SHA-256 over the root key and all tokens up to a block's end.

    Chained, but not block by block: every `ANCHOR_BLOCKS`-th name stands for all before it, and those up to the next
    are made from it (`anchor`: the one before `anchor_block(first)`) and the tokens since, in one run of the hash.
    """
    keys: list[bytes] = []
    start = anchor_block(first)
    while start < last:
        end = min(start + ANCHOR_BLOCKS, last)
        digest = sha256(anchor)
        if start < first:
            digest.update(tokens[start * block_bytes : first * block_bytes])
        position = max(start, first) * block_bytes
        while position < end * block_bytes:
            digest.update(tokens[position : position + block_bytes])
            keys.append(digest.digest())
            position += block_bytes
        anchor, start = keys[-1], end
    return keys


def anchor_block(block: int) -> int:
    """The first block after the name that the name of `block` is made from."""
    return block // ANCHOR_BLOCKS * ANCHOR_BLOCKS
