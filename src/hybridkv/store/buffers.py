"""Byte ranges as lists of memoryviews: splitting, counting, copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Buffers = Sequence[memoryview]


def as_bytes(buffers: Buffers) -> Buffers:
    """The same memory as views of bytes."""
    if all(view.nbytes == len(view) for view in buffers):
        return buffers
    return [view.cast("B") for view in buffers]


def total(buffers: Buffers) -> int:
    return sum(map(len, buffers))


def pieces(buffers: Buffers, nbytes: int, most: int) -> Iterator[tuple[Buffers, int]]:
    """Split buffers of `nbytes` in total into pieces of at most `most` bytes. Yields each piece with its length."""
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
    """The buffers without their first `count` bytes."""
    rest = list(buffers)
    while rest and count >= len(rest[0]):
        count -= len(rest.pop(0))
    if rest and count:
        rest[0] = rest[0][count:]
    return rest


def cut(buffers: Buffers, length: int) -> list[memoryview]:
    """The first `length` bytes of the buffers."""
    if total(buffers) == length:
        return list(buffers)
    found = []
    for view in buffers:
        found.append(view[:length])
        length -= len(found[-1])
    return found


def copy(target: memoryview, source: memoryview) -> None:
    """Copy with numpy, which releases the GIL; memoryview assignment does not."""
    if len(target):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def scatter(source: memoryview, buffers: Buffers) -> int:
    """Copy `source` into the buffers, in order. Returns the number of bytes copied."""
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
