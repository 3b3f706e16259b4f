"""How long an accelerator takes to compute what a cache did not have: published peak figures and simple arithmetic.

Prefill is limited by computing, decode by reading weights. Neither knows of batching effects, communication or kernels:
good for comparing caches on one machine, not for predicting its speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.errors import InputError
from hybridkv.models import Compute

DEFAULT_UTILISATION = 0.4
"""The part of the peak that prefill reaches: what large models are commonly measured at, 0.3 to 0.5."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device."""

    name: str
    flops: float
    """Dense bf16 FLOP/s, as published; without structured sparsity."""
    memory_bytes_per_s: float
    utilisation: float = DEFAULT_UTILISATION
    """Of `flops`, in prefill."""

    def prefill_seconds(self, compute: Compute, start: int, end: int, tp: int = 1) -> float:
        """To compute tokens [start, end) of a sequence whose first `start` tokens are cached, on `tp` devices."""
        _check_tp(tp)
        return compute.flops(start, end) / (tp * self.flops * self.utilisation)

    def decode_tokens_per_s(self, compute: Compute, tp: int = 1, *, weight_bytes: float = 2, batch: int = 1) -> float:
        """Tokens a second of all `batch` sequences together, if each step reads the weights once and nothing else.

        `weight_bytes`: of one parameter. A step of one token reads the active parameters; the more tokens, the more
        experts they ask for, up to all. KV and states are not read: an upper bound.
        """
        _check_tp(tp)
        if batch < 1 or weight_bytes <= 0:
            raise InputError(f"batch {batch}, {weight_bytes} bytes a weight: expected at least 1, and more than 0")
        most = max(compute.active_parameters, compute.total_parameters)
        read_bytes = min(batch * compute.active_parameters, most) * weight_bytes
        return batch * tp * self.memory_bytes_per_s / read_bytes


def _check_tp(tp: int) -> None:
    if tp < 1:
        raise InputError(f"tensor-parallel size {tp}: expected at least 1 device")


_TERA = 1e12
ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("a100", 312 * _TERA, 2.039 * _TERA),  # SXM, 80 GB
        Accelerator("h100", 989.4 * _TERA, 3.35 * _TERA),  # SXM
        Accelerator("h200", 989.4 * _TERA, 4.8 * _TERA),
        Accelerator("h20", 148 * _TERA, 4.0 * _TERA),
        Accelerator("b200", 2250 * _TERA, 8.0 * _TERA),
        Accelerator("b300", 2250 * _TERA, 8.0 * _TERA),
        Accelerator("l4", 121 * _TERA, 0.3 * _TERA),
        Accelerator("l40s", 362 * _TERA, 0.864 * _TERA),
        Accelerator("a10", 125 * _TERA, 0.6 * _TERA),
        Accelerator("rtx4090", 165.2 * _TERA, 1.008 * _TERA),
        Accelerator("mi300x", 1307.4 * _TERA, 5.3 * _TERA),
        Accelerator("mi325x", 1307.4 * _TERA, 6.0 * _TERA),
        Accelerator("mi355x", 2516.6 * _TERA, 8.0 * _TERA),
    )
}


def accelerator(name: str) -> Accelerator:
    """The accelerator called `name`, in any case."""
    found = ACCELERATORS.get(name.strip().lower())
    if found is None:
        raise InputError(f"unknown accelerator {name[:40]!r}: choose one of {', '.join(ACCELERATORS)}")
    return found
