"""Keys of a request's positions, which name stored objects. Computed on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from hashlib import sha256

from hybridkv.cache.tokens import TOKEN_BYTES, anchor_block, block_keys


class BlockKeys:
    """Keys of one request. A key covers all tokens before its position, and the root key (the salt ...).

    Thread-safe.
    """

    def __init__(self, root_key: bytes, block_tokens: int) -> None:
        self._root_key = root_key
        self._block_tokens = block_tokens
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._keys: list[bytes] = []
        self._lock = threading.Lock()

    def first(self, num_blocks: int, tokens: bytes | bytearray) -> Sequence[bytes]:
        """Keys of the first `num_blocks` blocks. `tokens` may have grown since the last call."""
        with self._lock:
            known = len(self._keys)
            if known < num_blocks:
                anchor = self._keys[start - 1] if (start := anchor_block(known)) else self._root_key
                self._keys += block_keys(anchor, tokens, known, num_blocks, self._block_bytes)
            return self._keys[:num_blocks]

    def at(self, ends: Iterable[int], tokens: bytes | bytearray) -> dict[int, bytes]:
        """Keys of these positions, which may lie inside blocks."""
        size, wanted = self._block_tokens, list(ends)
        keys = self.first(max(wanted, default=0) // size, tokens)
        return {end: self._inside(end, keys, tokens) if end % size else keys[end // size - 1] for end in wanted}

    def _inside(self, end: int, keys: Sequence[bytes], tokens: bytes | bytearray) -> bytes:
        """The key of a position inside a block: what `block_keys` would make of a shorter last block."""
        start = anchor_block(end // self._block_tokens)
        anchor = keys[start - 1] if start else self._root_key
        return sha256(anchor + tokens[start * self._block_bytes : end * TOKEN_BYTES]).digest()
