"""Runs of bytes as lists of memoryviews: cutting, counting, copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Buffers = Sequence[memoryview]


def as_bytes(buffers: Buffers) -> Buffers:
    """The same memory, seen as bytes."""
    if all(view.nbytes == len(view) for view in buffers):
        return buffers
    return [view.cast("B") for view in buffers]


def total(buffers: Buffers) -> int:
    return sum(map(len, buffers))


def pieces(buffers: Buffers, nbytes: int, most: int) -> Iterator[tuple[Buffers, int]]:
    """The buffers, of `nbytes` in all, cut into runs of at most `most` bytes; each with its length."""
    if nbytes <= most:
        yield buffers, nbytes
        return
    piece, room = [], most
    for view in buffers:
        while len(view):
            part, view = view[:room], view[room:]
            piece.append(part)
            room -= len(part)
            if room == 0:
                yield piece, most
                piece, room = [], most
    if piece:
        yield piece, most - room


def skip(buffers: Buffers, count: int) -> list[memoryview]:
    """What follows the first `count` bytes."""
    rest = list(buffers)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if rest and count:
        rest[0] = rest[0][count:]
    return rest


def copy(target: memoryview, source: memoryview) -> None:
    """Numpy lets other threads run meanwhile, memoryviews do not."""
    if len(target):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def scatter(source: memoryview, buffers: Buffers) -> int:
    """Copy as much as there is into the buffers, one after the other."""
    done = 0
    for view in buffers:
        part = source[done : done + len(view)]
        copy(view[: len(part)], part)
        done += len(part)
    return done


def gather(target: memoryview, buffers: Buffers) -> None:
    done = 0
    for view in buffers:
        copy(target[done : done + len(view)], view)
        done += len(view)
