"""Keys of a request's blocks: what stored objects are named by. Computed when first asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from hybridkv.cache.tokens import TOKEN_BYTES, anchor_block, block_keys


class BlockKeys:
    """Each covers all tokens before its block's end, the salt and other keys of the request.

    May be asked on several threads.
    """

    def __init__(self, root_key: bytes, block_tokens: int) -> None:
        self._root_key = root_key
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._keys: list[bytes] = []
        self._lock = threading.Lock()

    def first(self, num_blocks: int, tokens: bytes | bytearray) -> Sequence[bytes]:
        """Keys of the first blocks. `tokens` may have grown since the last call."""
        with self._lock:
            known = len(self._keys)
            if known < num_blocks:
                anchor = self._keys[start - 1] if (start := anchor_block(known)) else self._root_key
                self._keys += block_keys(anchor, tokens, known, num_blocks, self._block_bytes)
            return self._keys[:num_blocks]

    def at(self, ends: Iterable[int], tokens: bytes | bytearray) -> dict[int, bytes]:
        """By position: the keys of blocks that end there."""
        size, wanted = self._block_bytes // TOKEN_BYTES, list(ends)
        keys = self.first(max(wanted, default=0) // size, tokens)
        return {end: keys[end // size - 1] for end in wanted}
