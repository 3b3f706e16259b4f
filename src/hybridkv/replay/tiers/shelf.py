"""The objects of one tier by name: no bytes, only what is there, how large it is and when it was used.

A full shelf evicts in the order of `store.eviction`: by age divided by value in buckets of powers of two, the deepest
objects of a bucket first, and spare objects before all others. All objects of a group have the same value here, so the
group's mean is that value. The order is found with arrays: traces store millions of objects, and sorting all of them at
each eviction would take hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybridkv.store.eviction import spare_limit, with_slack

_Number = TypeVar("_Number", np.int64, np.float64, np.bool_)
_FIRST_SLOTS = 1024
_YOUNGEST_S = 1.0
"""As in `store.eviction`: smaller ages are equal."""


class Shelf:
    """What one tier holds. Groups are numbers, as in `values`; keys name positions."""

    def __init__(self, size_bytes: int, values: Sequence[float]) -> None:
        """`values`: by group, the compute that an object saves per byte."""
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.spare_bytes = 0
        """Bytes of objects that only fill idle room."""
        self.peak_bytes = 0
        self.written_bytes = 0
        self.evicted = 0
        """Objects evicted, but for spare ones."""
        self.dropped = 0
        """Objects that are larger than the tier."""
        self._values = np.array(values, dtype=np.float64)
        self._slots: list[dict[bytes, int]] = [{} for _ in values]
        self._free: list[int] = []
        self._keys: list[bytes] = []
        self._groups: npt.NDArray[np.int64] = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self._positions: npt.NDArray[np.int64] = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self._sizes: npt.NDArray[np.int64] = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        """0: the slot is free."""
        self._used_at: npt.NDArray[np.float64] = np.zeros(_FIRST_SLOTS, dtype=np.float64)
        self._is_spare: npt.NDArray[np.bool_] = np.zeros(_FIRST_SLOTS, dtype=np.bool_)

    @property
    def idle_bytes(self) -> int:
        """Room that is free or taken by spare objects."""
        return max(0, spare_limit(self.size_bytes) - self.used_bytes + self.spare_bytes)

    def has(self, group: int, key: bytes) -> bool:
        return key in self._slots[group]

    def add(self, group: int, key: bytes, position: int, nbytes: int, now: float, *, is_spare: bool = False) -> None:
        """Store an object that ends at `position`, unless it is there. Others are evicted if there is no room.

        A spare object evicts only other spare ones. It becomes a normal one when it is touched, or added as one.
        """
        slot = self._slots[group].get(key)
        if slot is not None:
            if not is_spare:
                self._firm(slot)
            return
        if nbytes > self.size_bytes:
            self.dropped += not is_spare
            return
        if is_spare and nbytes > self.idle_bytes:
            return
        excess = self.used_bytes + nbytes - (spare_limit(self.size_bytes) if is_spare else self.size_bytes)
        self._evict(with_slack(excess, self.size_bytes, is_told=False, spare_bytes=self.spare_bytes), now)
        slot = self._slots[group][key] = self._take_slot(key)
        self._groups[slot], self._positions[slot], self._sizes[slot] = group, position, nbytes
        self._used_at[slot], self._is_spare[slot] = now, is_spare
        self.used_bytes += nbytes
        self.spare_bytes += nbytes if is_spare else 0
        self.written_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def touch(self, group: int, key: bytes, now: float) -> None:
        slot = self._slots[group].get(key)
        if slot is not None:
            self._used_at[slot] = now
            self._firm(slot)

    def _firm(self, slot: int) -> None:
        """Turn a spare object into a normal one."""
        if self._is_spare[slot]:
            self._is_spare[slot] = False
            self.spare_bytes -= int(self._sizes[slot])

    def _take_slot(self, key: bytes) -> int:
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
            return slot
        slot = len(self._keys)
        self._keys.append(key)
        if slot == len(self._sizes):
            self._groups, self._positions = _twice(self._groups), _twice(self._positions)
            self._sizes, self._used_at = _twice(self._sizes), _twice(self._used_at)
            self._is_spare = _twice(self._is_spare)
        return slot

    def _evict(self, nbytes: int, now: float) -> None:
        if nbytes <= 0:
            return
        for slot in self._chosen(nbytes, now).tolist():
            del self._slots[int(self._groups[slot])][self._keys[slot]]
            self.used_bytes -= int(self._sizes[slot])
            self.evicted += not self._is_spare[slot]
            self._firm(slot)
            self._sizes[slot] = 0
            self._keys[slot] = b""
            self._free.append(slot)

    def _chosen(self, nbytes: int, now: float) -> npt.NDArray[np.int64]:
        """Slots to evict: whole buckets, and the deepest objects of the last one."""
        going = list[npt.NDArray[np.int64]]()
        is_held = self._sizes > 0
        for held in (np.flatnonzero(is_held & self._is_spare), np.flatnonzero(is_held & ~self._is_spare)):
            age = np.maximum(now - self._used_at[held], _YOUNGEST_S)
            buckets = np.floor(np.log2(age) - np.log2(self._values[self._groups[held]])).astype(np.int64)
            for bucket in np.unique(buckets)[::-1]:
                if nbytes <= 0:
                    break
                slots = held[buckets == bucket]
                freed = int(self._sizes[slots].sum())
                if freed > nbytes:
                    slots = self._deepest(slots, nbytes)
                going.append(slots)
                nbytes -= freed
        return np.concatenate(going) if going else np.zeros(0, dtype=np.int64)

    def _deepest(self, slots: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.int64]:
        """The first objects of a bucket, in its order, that free `nbytes`."""
        values = self._values[self._groups[slots]]
        ordered = slots[np.lexsort((self._used_at[slots], values, -self._positions[slots]))]
        count = int(np.searchsorted(np.cumsum(self._sizes[ordered]), nbytes)) + 1
        return ordered[:count]


def _twice(array: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    return np.concatenate([array, np.zeros_like(array)])
