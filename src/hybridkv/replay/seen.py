"""Which prefixes a replay has computed so far, whatever the cache has kept of them."""

from __future__ import annotations

import numpy as np

from hybridkv.replay.traces import TraceRequest


class Seen:
    """Tokens computed of each piece of a trace."""

    def __init__(self, num_pieces: int) -> None:
        self._tokens = np.zeros(num_pieces, dtype=np.int32)

    def length(self, request: TraceRequest) -> int:
        """How many tokens of the prompt, from its start, have been computed before."""
        size = request.piece_tokens
        counts = self._tokens[request.chain[: -(-request.prompt_tokens // size)]]
        short = counts < size
        if not short.any():
            return min(request.prompt_tokens, len(counts) * size)
        depth = int(short.argmax())
        return min(request.prompt_tokens, depth * size + int(counts[depth]))

    def add(self, request: TraceRequest, num_tokens: int) -> None:
        """The first `num_tokens` tokens of prompt and reply have been computed."""
        size, num_tokens = request.piece_tokens, min(num_tokens, request.chain_tokens)
        whole = num_tokens // size
        self._tokens[request.chain[:whole]] = size
        if whole < len(request.chain):
            piece = request.chain[whole]
            self._tokens[piece] = max(self._tokens[piece], num_tokens - whole * size)
