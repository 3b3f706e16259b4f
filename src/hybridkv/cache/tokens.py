"""Tokens as bytes, four a token, so that comparing prefixes is one memcmp; and the names of blocks outside."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from hybridkv.errors import HybridKVError

TokenIds = Sequence[int] | bytes | bytearray | npt.NDArray[np.int32]

TOKEN_BYTES = 4
_structs: dict[int, struct.Struct] = {}


def pack_tokens(tokens: TokenIds) -> bytes:
    """Token ids as little-endian int32. An int32 array or packed bytes are taken as they are; lists cost more."""
    if isinstance(tokens, (bytes, bytearray)):
        if len(tokens) % TOKEN_BYTES:
            raise HybridKVError(f"{len(tokens)} bytes of tokens: packed tokens take {TOKEN_BYTES} bytes each")
        return bytes(tokens)
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.dtype("<i4") or tokens.ndim != 1:
            raise HybridKVError(f"tokens of dtype {tokens.dtype} and shape {tokens.shape}: pass one row of int32")
        return tokens.tobytes()
    count = len(tokens)
    if count == 1 and type(tokens[0]) is int and 0 <= tokens[0] < 2**31:  # what decoding samples
        return tokens[0].to_bytes(TOKEN_BYTES, "little")
    packer = _structs.get(count)
    if packer is None:
        if len(_structs) > 4096:
            _structs.clear()
        packer = _structs[count] = struct.Struct(f"<{count}i")
    try:
        return packer.pack(*tokens)
    except struct.error as error:
        raise HybridKVError(f"token ids must be integers that fit into 32 bits: {error}") from None


def root_key(salt: str = "", extra_keys: Sequence[str] = ()) -> bytes:
    """What separates tenants, adapters and media: different keys never meet, in the tree or in block names."""
    return _root_key(salt, tuple(extra_keys))


@lru_cache(maxsize=1024)
def _root_key(salt: str, extra_keys: tuple[str, ...]) -> bytes:
    digest = sha256()
    for text in (salt, *extra_keys):
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def block_keys(parent: bytes, tokens: bytes | bytearray, block_bytes: int) -> list[bytes]:
    """The chained SHA-256 names of whole blocks that follow a block named `parent`."""
    keys, key, data = [], parent, bytes(tokens)
    for start in range(0, len(data), block_bytes):
        key = sha256(key + data[start : start + block_bytes]).digest()
        keys.append(key)
    return keys
