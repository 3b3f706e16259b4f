"""Tokens as packed bytes (four per token, so that comparing prefixes is one memcmp), lookup keys, and block keys."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from hybridkv.errors import InputError, RequestError

TokenIds = Sequence[int] | bytes | bytearray | npt.NDArray[np.int32]

TOKEN_BYTES = 4
ANCHOR_BLOCKS = 16
_structs: dict[int, struct.Struct] = {}


def pack_tokens(tokens: TokenIds) -> bytes:
    """Token ids as little-endian int32. int32 arrays and packed bytes are used as they are; lists are slower."""
    if isinstance(tokens, (bytes, bytearray)):
        if len(tokens) % TOKEN_BYTES:
            raise InputError(f"{len(tokens)} bytes of tokens: packed tokens take {TOKEN_BYTES} bytes each")
        return bytes(tokens)
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.dtype("<i4") or tokens.ndim != 1:
            raise InputError(f"tokens of dtype {tokens.dtype} and shape {tokens.shape}: pass one row of int32")
        return tokens.tobytes()
    count = len(tokens)
    if count == 1:  # a decode step
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
    """Key for looking up a request's tokens in the index and in stores. Made by `lookup_key`."""

    root: bytes
    """Separates tenants, adapters and media: different roots share neither nodes of the tree nor block keys."""
    taps: tuple[str, ...]
    """Groups of tapped layers that the request also needs."""


def lookup_key(salt: object = "", extra_keys: Sequence[object] = (), taps: Sequence[str] = ()) -> LookupKey:
    """Make a request's key. `salt`: its tenant. `extra_keys`: its adapter and media. `taps`: tapped layers by group.

    Salt and extra keys are strings. They are objects here because compiled code would raise a TypeError before ours.
    """
    try:
        root = _root_key(cast(str, salt), cast("tuple[str, ...]", tuple(extra_keys)))
    except (AttributeError, TypeError, UnicodeEncodeError):
        raise RequestError("a salt or an extra key that is no text: pass strings of whole characters") from None
    return LookupKey(root, tuple(taps))


def adapter_key(name: str, digest: str) -> str:
    """The extra key of a request's adapter. `digest`: of its files, since another adapter may get the same name."""
    return f"lora {name} {digest}"


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
    """The keys of blocks [first, last) of a prompt: SHA-256 over the root key and all tokens up to a block's end.

    The hash is chained at every `ANCHOR_BLOCKS`-th block (an anchor), not at every block. A key is the hash of the last
    anchor's key and all tokens since. `anchor`: the key of the block before `anchor_block(first)`.
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
    """The first block after the anchor from which the key of `block` is made."""
    return block // ANCHOR_BLOCKS * ANCHOR_BLOCKS
