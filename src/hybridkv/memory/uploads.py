"""The one way of small host arrays to the device. It knows nothing of what they mean.

A record is a few named arrays that travel together: one transfer into one flat buffer of int64. On a GPU the buffer of
a record stays where it is from step to step, until it has to grow. So a record of the same sizes has the same
addresses, and what was captured with them, such as a CUDA graph, can be replayed. What is made of records on the
device before the model runs has its `room`, which stays likewise.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Column: TypeAlias = Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]


class Uploader:
    """Buffers by name on one device. What was sent is valid until the next `begin`.

    persistent: keep buffers between steps. On a CPU a fresh tensor costs less than a copy.
    """

    def __init__(self, device: torch.device, *, persistent: bool | None = None) -> None:
        self.device = device
        self.is_persistent = device.type != "cpu" if persistent is None else persistent
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.constants: dict[Hashable, torch.Tensor] = {}
        """Tensors that are the same in every step, kept by those who make them."""
        self._used: set[str] = set()

    def begin(self) -> None:
        """A new step: every record may be sent again."""
        self._used.clear()

    def send(self, name: str, **columns: Column) -> dict[str, torch.Tensor]:
        """The columns of record `name` on the device, flat."""
        self._use(name)
        # An empty list counts as floats, hence the casting.
        flat = np.concatenate(tuple(columns.values()), axis=None, dtype=np.int64, casting="unsafe")
        sizes = [column.size if isinstance(column, np.ndarray) else len(column) for column in columns.values()]
        whole = torch.from_numpy(flat)
        whole = self._copy(name, whole) if self.is_persistent else whole.to(self.device)
        return dict(zip(columns, whole.split(sizes), strict=True))

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device, with anything in it, for what is made of records."""
        self._use(name)
        if not self.is_persistent:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._kept(name, prod(shape), dtype).view(tuple(shape))

    def flags(self, name: str, column: torch.Tensor) -> torch.Tensor:
        """A column that was sent, as booleans."""
        return self.room(name, column.shape, torch.bool).copy_(column)

    def _use(self, name: str) -> None:
        if name in self._used:
            raise ValueError(f"record {name!r} was already sent in this step: its tensors are in use")
        self._used.add(name)

    def _copy(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            # Torch gives this pinned memory to the next one only after the transfer, so that no step waits for it.
            whole = whole.pin_memory()
        return self._kept(name, len(whole), torch.int64).copy_(whole, non_blocking=True)

    def _kept(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        key = (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            with torch.inference_mode(False):  # else only steps could write to it
                buffer = torch.empty(1 << max(6, (size - 1).bit_length()), dtype=dtype, device=self.device)
            self._buffers[key] = buffer
        return buffer[:size]
