"""Replies, found in the next turn that contains them.

A trace seldom says what was answered, but the next turn of a conversation sends it back: prompt, reply, new question.
So where a later, longer request begins with all whole pieces of a prompt, what it has after them is taken for the end
of that prompt and its reply. The first such request counts. Where there is none, and beyond what it has, a reply is
made of tokens that occur nowhere else.

In a Mooncake trace the last, partial block of a prompt has a name of its own, so the end of the prompt cannot be
compared. Two whole blocks that are the conversation's own must match for that: blocks up to one that is followed by
many different ones (a system prompt) are everybody's.
"""

from __future__ import annotations

import numpy as np

from hybridkv.replay.traces import TOKEN_BYTES, Chain, Record, Trace, TraceRequest

_MOST_WAYS_ON = 4
"""A piece followed by more different ones than this is everybody's."""
_OWN_PIECES = 2
_MOST_HOPS = 64
"""Repetitions of one prompt that are passed over on the way to its continuation; keeps the search linear."""

_End = tuple[int, bytes]
"""How a prompt ends: its last whole piece, and the tokens after it where they can be compared."""


class Conversations:
    """A trace with all its replies."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.continued_by = find_continuations(trace)
        """By request: the next turn, if the trace has it."""
        self._chains = _join_chains(trace, self.continued_by)

    def __len__(self) -> int:
        return len(self.trace)

    def __getitem__(self, index: int) -> TraceRequest:
        """The request with a reply of exactly `output_tokens` tokens."""
        record, chain = self.trace.records[index], self._chains[index]
        reply, known, known_end = record.reply, chain, record.chain_tokens
        following = self.continued_by[index]
        if not reply and following is not None:
            reply, known, known_end = self._reply(record, following)
        missing = record.output_tokens - len(reply) // TOKEN_BYTES
        if missing > 0:
            reply += np.full(missing, -1 - index, dtype="<i4").tobytes()  # no trace has negative tokens
        return TraceRequest(
            record.arrival_s,
            record.tokens(0, record.prompt_tokens, chain),
            record.prompt_tokens,
            record.output_tokens,
            reply,
            record.known_tokens,
            known,
            known_end,
            record.piece_tokens,
            record.breakpoints,
        )

    def _reply(self, record: Record, following: int) -> tuple[bytes, Chain, int]:
        """What the next turn has after the prompt, and the pieces up to there, and where that is."""
        turn, chain = self.trace.records[following], self._chains[following]
        start = record.prompt_tokens
        end = min(start + record.output_tokens, turn.prompt_tokens)
        num_pieces = -(-end // turn.piece_tokens)
        return turn.tokens(start, end, chain), chain[:num_pieces], min(end, turn.chain_tokens)


def find_continuations(trace: Trace) -> list[int | None]:
    """For each request the first later one that is longer and begins with it, as far as the trace can tell."""
    ends = [_end(record) for record in trace.records]
    tail_lengths: dict[int, set[int]] = {}
    for end in ends:
        if end is not None:
            tail_lengths.setdefault(end[0], set()).add(len(end[1]))
    owns = _has_own_pieces(trace)
    first: dict[_End, int] = {}  # the first of the requests looked at that passes an end: they are looked at backwards
    same: list[int | None] = [None] * len(trace)
    following: list[int | None] = [None] * len(trace)
    for index in range(len(trace) - 1, -1, -1):
        record, end = trace.records[index], ends[index]
        if end is not None:
            same[index] = first.get(end)
            if owns[index]:
                following[index] = _first_longer(trace, index, same)
        for passed in _ends_passed(record, tail_lengths):
            first[passed] = index
    return following


def _end(record: Record) -> _End | None:
    whole = record.whole_pieces
    if record.prompt is None:
        return (int(record.chain[whole - 1]), b"") if whole else None
    last = int(record.chain[whole - 1]) if whole else -1
    return last, record.prompt[whole * record.piece_tokens * TOKEN_BYTES :]


def _ends_passed(record: Record, tail_lengths: dict[int, set[int]]) -> list[_End]:
    """The ends of prompts that this prompt contains, of those that occur."""
    pieces = record.chain[: record.whole_pieces].tolist()
    if record.prompt is None:
        return [(piece, b"") for piece in pieces if piece in tail_lengths]
    passed = []
    for depth, piece in enumerate([-1, *pieces]):
        start = depth * record.piece_tokens * TOKEN_BYTES
        for length in tail_lengths.get(piece, ()):
            if start + length <= len(record.prompt):
                passed.append((piece, record.prompt[start : start + length]))
    return passed


def _first_longer(trace: Trace, index: int, same: list[int | None]) -> int | None:
    """Requests that pass the same end and are no longer end there too, so `same` leads on from each of them."""
    length, candidate = trace.records[index].prompt_tokens, same[index]
    for _ in range(_MOST_HOPS):
        if candidate is None or trace.records[candidate].prompt_tokens > length:
            return candidate
        candidate = same[candidate]
    return None


def _has_own_pieces(trace: Trace) -> list[bool]:
    """Whether enough of a prompt is its own; always where the whole prompt can be compared."""
    common = np.array(trace.fanout, dtype=np.int64) > _MOST_WAYS_ON
    owns = []
    for record in trace.records:
        shared = np.flatnonzero(common[record.chain[: record.whole_pieces]])
        own = record.whole_pieces - (int(shared[-1]) + 1 if len(shared) else 0)
        owns.append(record.prompt is not None or own >= _OWN_PIECES)
    return owns


def _join_chains(trace: Trace, following: list[int | None]) -> list[Chain]:
    """Chains in which the partial last piece of a prompt is the piece of its next turn."""
    chains = [record.chain for record in trace.records]
    for index in range(len(trace) - 1, -1, -1):  # backwards: the next turn's own last piece may have become another
        record, turn = trace.records[index], following[index]
        whole = record.whole_pieces
        if turn is not None and record.prompt is None and len(chains[index]) > whole:
            chains[index] = np.append(chains[index][:whole], chains[turn][whole])
    return chains
