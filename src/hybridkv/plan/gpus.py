"""How many GPUs of which memory hold a model's weights and the cache of its requests.

A number of GPUs is a tensor-parallel size: each holds an equal part of the weights and one rank of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hybridkv.errors import ParallelismError, PlanError
from hybridkv.plan.plan import Plan, PlanOptions, make_plan
from hybridkv.spec import ModelSpec

_GIB = 2**30
USABLE_RATIO = 0.9
"""The part of a GPU's memory for weights and cache. Activations, graphs and the driver take the rest."""
GPU_COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A common size of GPU memory."""

    memory_bytes: int
    example: str

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * USABLE_RATIO)


GPUS = (
    Gpu(24 * _GIB, "RTX 4090"),
    Gpu(48 * _GIB, "RTX 6000 Ada"),
    Gpu(80 * _GIB, "H100"),
    Gpu(141 * _GIB, "H200"),
    Gpu(192 * _GIB, "MI300X"),
    Gpu(288 * _GIB, "MI355X"),
)


@dataclass(frozen=True, slots=True)
class GpuFit:
    """The cache that weights leave room for on each of `num_gpus` GPUs."""

    gpu: Gpu
    num_gpus: int
    cache_bytes: int
    """Cache of one GPU; 0 if the weights alone do not fit."""
    plan: Plan | None
    """None if there is no room for weights and the smallest cache."""

    def max_requests(self, num_tokens: int) -> int:
        return self.plan.max_requests(num_tokens) if self.plan is not None else 0


def fits_on_gpus(
    model_of: Callable[[int], ModelSpec], options: PlanOptions, weight_bytes: int, counts: Iterable[int] = GPU_COUNTS
) -> list[GpuFit]:
    """Every GPU of `GPUS` in each of `counts` that the model can be split over, ordered by GPU, then by count.

    `model_of` gives the spec of one rank for a tensor-parallel size. `weight_bytes` are those of the whole model. Of
    `options`, everything but the memory counts.
    """
    models = {count: model for count in sorted(set(counts)) if (model := _split(model_of, count)) is not None}
    return [_fit(gpu, count, model, options, weight_bytes) for gpu in GPUS for count, model in models.items()]


def fewest_gpus(fits: Sequence[GpuFit], gpu: Gpu, num_requests: int, num_tokens: int) -> int | None:
    """How many of `gpu` it takes for that many requests of that length at once; None if none of `fits` is enough."""
    enough = (fit.num_gpus for fit in fits if fit.gpu == gpu and fit.max_requests(num_tokens) >= num_requests)
    return min(enough, default=None)


def _split(model_of: Callable[[int], ModelSpec], count: int) -> ModelSpec | None:
    try:
        return model_of(count)
    except ParallelismError:
        return None


def _fit(gpu: Gpu, count: int, model: ModelSpec, options: PlanOptions, weight_bytes: int) -> GpuFit:
    cache_bytes = max(0, gpu.usable_bytes - -(-weight_bytes // count))
    return GpuFit(gpu, count, cache_bytes, _plan(model, replace(options, memory_bytes=cache_bytes)))


def _plan(model: ModelSpec, options: PlanOptions) -> Plan | None:
    if not options.memory_bytes:
        return None
    try:
        return make_plan(model, options)
    except PlanError:  # too little memory: all else was checked when the model was planned
        return None
