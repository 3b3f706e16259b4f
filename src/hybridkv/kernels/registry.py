"""Which implementation of a kernel runs where: by its kind and the kind of device. Faster ones are added here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybridkv.errors import InputError
from hybridkv.kernels.attention import attend, attend_visible
from hybridkv.kernels.conv import conv
from hybridkv.kernels.delta import gated_delta, kimi_delta
from hybridkv.kernels.lightning import lightning
from hybridkv.kernels.mamba import mamba1, mamba2

Kernel = Callable[..., Any]

ANY_DEVICE = "any"
KERNELS: dict[str, dict[str, Kernel]] = {
    "attend": {ANY_DEVICE: attend},
    "attend_visible": {ANY_DEVICE: attend_visible},
    "conv": {ANY_DEVICE: conv},
    "gated_delta": {ANY_DEVICE: gated_delta},
    "kimi_delta": {ANY_DEVICE: kimi_delta},
    "mamba2": {ANY_DEVICE: mamba2},
    "mamba1": {ANY_DEVICE: mamba1},
    "lightning": {ANY_DEVICE: lightning},
}
"""By kind, then by type of device: "cuda", "cpu", or any other. A kind's signature is that of its torch form."""


def kernel(kind: str, device: torch.device) -> Kernel:
    """The implementation for a device."""
    try:
        choices = KERNELS[kind]
    except KeyError:
        raise InputError(f"no kernel {kind!r}: there are {', '.join(KERNELS)}") from None
    return choices.get(device.type) or choices[ANY_DEVICE]
