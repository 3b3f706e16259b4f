"""Spans of more than one token, and their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridkv.kernels.spans import Span


class LongSpan(NamedTuple):
    """One request's segments by rows of the packed step."""

    span: Span
    segments: list[tuple[int, int, int, int]]
    """(first row, end row, src page, dst page)"""


def upload(columns: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> list[Tensor]:
    """Index tensors of several columns, in one transfer."""
    arrays = [np.asarray(column, dtype=np.int64) for column in columns]
    together = torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
    return list(together.split([len(array) for array in arrays]))
