"""Checksums of parcels. Both sides read the same runs in the same order, each in its own arena."""

from __future__ import annotations

from xxhash import xxh3_64

from hybridkv.link.agent import Offsets


def checksum(arena: memoryview, offsets: Offsets, nbytes: Offsets) -> int:
    """A digest of runs of an arena, as if they lay end to end."""
    digest = xxh3_64()
    for offset, size in zip(offsets.tolist(), nbytes.tolist(), strict=True):
        digest.update(arena[offset : offset + size])
    return digest.intdigest()
