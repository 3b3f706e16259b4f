"""Keys of a request's blocks, which name stored objects. Computed on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from hybridkv.cache.tokens import TOKEN_BYTES, anchor_block, block_keys


class BlockKeys:
    """Keys of one request's blocks. A key covers all tokens before its block's end, and the root key (the salt ...).

    Thread-safe.
    """

    def __init__(self, root_key: bytes, block_tokens: int) -> None:
        self._root_key = root_key
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
        """Keys of the blocks that end at these positions, by position."""
        size, wanted = self._block_bytes // TOKEN_BYTES, list(ends)
        keys = self.first(max(wanted, default=0) // size, tokens)
        return {end: keys[end // size - 1] for end in wanted}
