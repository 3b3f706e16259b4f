"""An arena on a GPU, for a link. NIXL writes from GPU memory to GPU memory; checksums are computed on the host."""

from __future__ import annotations

import torch
from xxhash import xxh3_64

from hybridkv.link.arena import Offsets, Place


class DeviceArena:
    """An arena in the memory of a CUDA device."""

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer`: all bytes of the arena, contiguous."""
        self.place = Place(buffer.data_ptr(), len(buffer), "VRAM", buffer.device.index or 0)
        self._buffer = buffer
        self._stream = torch.cuda.Stream(buffer.device)

    def checksum(self, offsets: Offsets, nbytes: Offsets) -> int:
        """The bytes that are read must have been written by work that is complete."""
        with torch.cuda.stream(self._stream):
            runs = zip(offsets.tolist(), nbytes.tolist(), strict=True)
            copied = torch.cat([self._buffer[offset : offset + size] for offset, size in runs]).cpu()
        return xxh3_64(copied.numpy().data).intdigest()
