"""The memory of a link: where it lies, and how its bytes are read for checksums. On a GPU the engine reads them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

Offsets = NDArray[np.int64]


class Place(NamedTuple):
    """Where an arena lies, as NIXL names it."""

    address: int
    nbytes: int
    kind: str = "DRAM"
    """DRAM, or VRAM: memory of a GPU."""
    device: int = 0


class Arena(Protocol):
    """All bytes of an engine's arena."""

    @property
    def place(self) -> Place: ...

    def checksum(self, offsets: Offsets, nbytes: Offsets) -> int:
        """A digest of runs, as if they lay end to end. Called on the threads of a link."""


class HostArena:
    """An arena in host memory."""

    def __init__(self, buffer: memoryview) -> None:
        self.place = Place(np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer))
        self._buffer = buffer

    def checksum(self, offsets: Offsets, nbytes: Offsets) -> int:
        digest = xxh3_64()
        for offset, size in zip(offsets.tolist(), nbytes.tolist(), strict=True):
            digest.update(self._buffer[offset : offset + size])
        return digest.intdigest()
