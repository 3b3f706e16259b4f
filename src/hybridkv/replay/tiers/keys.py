"""Names of positions: equal exactly where two requests have the same tokens before them."""

from __future__ import annotations

from hashlib import blake2b

from hybridkv.replay.traces import TOKEN_BYTES

_DIGEST_BYTES = 16


class PositionKeys:
    """The names of one request's positions. They are made when they are needed.

    A name is a digest of the name of the stretch before it and of the tokens since. Engines hash block by block, which
    would take longer than the rest of a replay.
    """

    def __init__(self, tokens: bytes, stretch_tokens: int) -> None:
        self._tokens = tokens
        self._stretch_tokens = stretch_tokens
        self._stretches = [b""]

    def stretch(self, number: int) -> bytes:
        """The name of the end of the first `number` stretches."""
        names, size = self._stretches, self._stretch_tokens * TOKEN_BYTES
        while len(names) <= number:
            start = (len(names) - 1) * size
            names.append(_digest(names[-1], self._tokens[start : start + size]))
        return names[number]

    def at(self, position: int) -> bytes:
        number, offset = divmod(position, self._stretch_tokens)
        before = self.stretch(number)
        if not offset:
            return before
        start = number * self._stretch_tokens * TOKEN_BYTES
        return _digest(before, self._tokens[start : position * TOKEN_BYTES])


def _digest(before: bytes, tokens: bytes) -> bytes:
    return blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest()
