"""Which implementation of a kernel runs in a step: the torch form in packed steps, the Triton form in decoding steps.

Both take the same arguments; only the table differs. Triton is imported when the first decoding step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hybridkv.errors import InputError
from hybridkv.kernels.attention import attend, attend_visible
from hybridkv.kernels.conv import conv
from hybridkv.kernels.decode.tables import DecodeStates, DecodeTokens
from hybridkv.kernels.delta import gated_delta, kimi_delta
from hybridkv.kernels.lightning import lightning
from hybridkv.kernels.mamba import mamba1, mamba2
from hybridkv.kernels.segments import SegmentTable
from hybridkv.kernels.tokens import TokenTable, write_both

Kernel = Callable[..., Any]

KERNELS: dict[str, Kernel] = {
    "write_tokens": write_both,
    "attend": attend,
    "attend_visible": attend_visible,
    "conv": conv,
    "gated_delta": gated_delta,
    "kimi_delta": kimi_delta,
    "mamba2": mamba2,
    "mamba1": mamba1,
    "lightning": lightning,
}
"""Kernels of packed steps, by kind. A kind's signature is that of its torch form."""


@cache
def decode_kernels() -> dict[str, Kernel]:
    """Kernels of decoding steps. `attend_latents` has no torch form: models expand latents in packed steps."""
    from hybridkv.kernels.decode import attention, conv, delta, latent, lightning, mamba

    return {
        "write_tokens": attention.write_tokens,
        "attend": attention.attend,
        "attend_latents": latent.attend_latents,
        "conv": conv.conv,
        "gated_delta": delta.gated_delta,
        "kimi_delta": delta.kimi_delta,
        "mamba2": mamba.mamba2,
        "mamba1": mamba.mamba1,
        "lightning": lightning.lightning,
    }


def kernel(kind: str, table: TokenTable | SegmentTable | DecodeTokens | DecodeStates) -> Kernel:
    """The implementation for a step with such a table."""
    kernels = decode_kernels() if isinstance(table, (DecodeTokens, DecodeStates)) else KERNELS
    try:
        return kernels[kind]
    except KeyError:
        raise InputError(f"no kernel {kind!r}: there are {', '.join(kernels)}") from None
