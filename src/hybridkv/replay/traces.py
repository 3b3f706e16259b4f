"""Requests of a trace, in memory. Nothing here knows files, the cache or time.

A trace names its tokens in pieces: the blocks of a Mooncake trace, or runs of 16 tokens where it has the tokens
themselves. A piece is known by everything up to its end, so equal pieces are equal prefixes; their numbers are dense,
and in a Mooncake trace they stand for the tokens: a piece numbered 7 is the token 7, as often as the piece is long.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Chain = npt.NDArray[np.int32]
TOKEN_BYTES = 4


class TraceRequest(NamedTuple):
    """One request, with its tokens packed as little-endian int32."""

    arrival_s: float
    prompt: bytes
    prompt_tokens: int
    output_tokens: int
    reply: bytes
    """May be empty: unknown."""
    known_tokens: int
    """Where the prompt may be continued, by what the trace says: its whole pieces, or all of it."""
    chain: Chain
    """The pieces of the prompt, and of the reply as far as the trace has it."""
    chain_tokens: int
    """Tokens of prompt and reply that the chain stands for."""
    piece_tokens: int
    breakpoints: tuple[int, ...] = ()
    """Positions that the trace names, such as the ends of messages."""

    @property
    def all_breakpoints(self) -> tuple[int, ...]:
        """Where a checkpoint is wanted; never what only later requests tell."""
        known = (self.known_tokens,) if self.known_tokens < self.prompt_tokens else ()
        return (*self.breakpoints, *known)


@dataclass(slots=True)
class Record:
    """What a trace says about one request. Prompts of Mooncake traces are made of their pieces on demand."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    piece_tokens: int
    chain: Chain
    prompt: bytes | None = None
    reply: bytes = b""
    breakpoints: tuple[int, ...] = ()

    @property
    def whole_pieces(self) -> int:
        """Pieces that the prompt fills."""
        return self.prompt_tokens // self.piece_tokens

    @property
    def known_tokens(self) -> int:
        return self.whole_pieces * self.piece_tokens if self.prompt is None else self.prompt_tokens

    @property
    def chain_tokens(self) -> int:
        return self.prompt_tokens if self.prompt is None else len(self.chain) * self.piece_tokens

    def tokens(self, start: int, end: int, chain: Chain) -> bytes:
        """Tokens [start, end) of this prompt, whose pieces may have become others: see `replies`."""
        if self.prompt is not None:
            return self.prompt[start * TOKEN_BYTES : end * TOKEN_BYTES]
        size = self.piece_tokens
        first = start // size
        pieces = np.repeat(chain[first : -(-end // size)], size)
        return pieces[start - first * size : end - first * size].tobytes()


class Chains:
    """Numbers the pieces of a trace: the same piece after the same pieces is the same number."""

    def __init__(self) -> None:
        self.fanout: list[int] = []
        """By piece: how many different ones follow it."""
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def number(self, names: Iterable[Hashable], piece_tokens: int) -> Chain:
        """The numbers of pieces that follow each other from the start; pieces of different sizes never meet."""
        numbers, fanout, parent = self._numbers, self.fanout, -piece_tokens
        chain = []
        for name in names:
            key = (parent, name)
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(numbers)
                fanout.append(0)
                if parent >= 0:
                    fanout[parent] += 1
            chain.append(number)
            parent = number
        return np.array(chain, dtype="<i4")


class Trace:
    """The requests of a trace by arrival. Tokens are made when a request is asked for, not kept."""

    def __init__(self, name: str, records: Sequence[Record], fanout: Sequence[int]) -> None:
        self.name = name
        self.records = records
        self.fanout = fanout

    @property
    def num_pieces(self) -> int:
        return len(self.fanout)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> TraceRequest:
        """The request without a reply, unless the trace says it."""
        record = self.records[index]
        return TraceRequest(
            record.arrival_s,
            record.tokens(0, record.prompt_tokens, record.chain),
            record.prompt_tokens,
            record.output_tokens,
            record.reply,
            record.known_tokens,
            record.chain,
            record.chain_tokens,
            record.piece_tokens,
            record.breakpoints,
        )

    def head(self, limit: int) -> Trace:
        """The first `limit` requests."""
        return Trace(self.name, self.records[:limit], self.fanout)
