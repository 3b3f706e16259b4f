"""Parcels: runs of bytes in both arenas, merged where they adjoin and cut into what is sent together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.cache import Role
from hybridkv.link.templates import Ints, Template

PARCEL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """Bytes that are sent together, all of one table of the target."""

    group: str
    """The cache group of the target: the name of its page table."""
    role: Role
    source: Ints
    """Offsets in the source's arena, as of each run."""
    target: Ints
    """Offsets in the target's arena."""
    nbytes: Ints
    total_bytes: int
    first_token: int
    """The first token that is lost if the parcel does not arrive; of states and local groups: `start`.

    It is before `start` if a block that begins there is sent whole.
    """
    last_layer: int
    """The last layer that it has. Of tapped layers: the layer that the hidden state enters."""


class Placed(NamedTuple):
    """Runs in both arenas, before parcels are cut; and the first token of each."""

    source: Ints
    target: Ints
    nbytes: Ints
    first: Ints


def cut(template: Template, placed: Placed, start: int, parcel_bytes: int) -> Iterator[Parcel]:
    """Parcels of consecutive runs. Runs of a parcel that adjoin on both sides become one."""
    cuts = _cuts(placed.nbytes, parcel_bytes)
    starts, nbytes = _joined(placed, cuts, template.page_gap)
    source, target = placed.source[starts], placed.target[starts]
    firsts = np.minimum.reduceat(placed.first, cuts).tolist()
    runs = np.searchsorted(starts, cuts)
    totals, bounds = np.add.reduceat(nbytes, runs).tolist(), [*runs.tolist(), len(starts)]
    has_tokens = template.group.role in (Role.FULL, Role.TAP)
    for number, (first, total) in enumerate(zip(firsts, totals, strict=True)):
        part = slice(bounds[number], bounds[number + 1])
        yield Parcel(
            template.target_table,
            template.group.role,
            source[part],
            target[part],
            nbytes[part],
            total,
            first if has_tokens else start,
            template.last_layer,
        )


def _cuts(nbytes: Ints, parcel_bytes: int) -> npt.NDArray[np.intp]:
    """The first run of each parcel."""
    ends = np.cumsum(nbytes)
    cuts, sent, total = [0], 0, int(ends[-1])
    while total - sent > parcel_bytes:
        cut = max(cuts[-1] + 1, int(ends.searchsorted(sent + parcel_bytes, side="right")))
        if cut == len(nbytes):
            break
        cuts.append(cut)
        sent = int(ends[cut - 1])
    return np.array(cuts, np.intp)


def _joined(placed: Placed, cuts: npt.NDArray[np.intp], page_gap: int) -> tuple[npt.NDArray[np.intp], Ints]:
    """The first of the runs that become one, and the bytes of each such run."""
    ends = placed.target + placed.nbytes
    gap = placed.target[1:] - ends[:-1]
    begins = np.ones(len(ends), np.bool_)
    begins[1:] = (placed.source[1:] - placed.source[:-1] - placed.nbytes[:-1] != gap) | ((gap != 0) & (gap != page_gap))
    begins[cuts] = True
    starts = np.flatnonzero(begins)
    last = np.append(starts[1:], len(ends)) - 1
    return starts, ends[last] - placed.target[starts]
