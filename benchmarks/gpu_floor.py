"""Measured limits of a decoding step: products of weights, bandwidths, and single kernels as shares of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridkv.errors import HybridKVError
from hybridkv.kernels.decode.tables import DecodeStates, DecodeTokens
from hybridkv.sight import EVERYTHING
from hybridkv.spec import AttentionLayer, ModelSpec

REPEATS = 10
CALLS = 10
"""Calls that a GPU times together, so that the launch of the first one hardly counts."""


class Bandwidths(NamedTuple):
    """Bytes per second of device memory."""

    copy: float
    """A copy's reads and writes together: two bytes for each byte that is copied."""
    read: float

    @classmethod
    def measure(cls, device: torch.device) -> Bandwidths:
        nbytes = 1 << (31 if device.type == "cuda" else 26)
        source = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        copy_s = seconds_of(lambda: target.copy_(source), device)
        read_s = seconds_of(lambda: source.sum(), device)
        return cls(2 * nbytes / copy_s, nbytes / read_s)


class Floor(NamedTuple):
    """The least milliseconds of a step, by what takes them."""

    products_ms: float
    """All weight matrices, once each, in one CUDA graph."""
    states_ms: float
    """The recurrent states, read once and written once."""
    kv_ms: float
    """The keys and values that the step's tokens see, read once."""

    @property
    def total_ms(self) -> float:
        return sum(self)


def measure_floor(model: nn.Module, spec: ModelSpec, num_requests: int, position: int, speeds: Bandwidths) -> Floor:
    """The floor of a step with one token of each request, at `position`."""
    return Floor(
        products_ms=1e3 * _products_s(model, num_requests),
        states_ms=1e3 * num_requests * 2 * spec.state_bytes / speeds.copy,
        kv_ms=1e3 * num_requests * seen_bytes(spec, position) / speeds.read,
    )


def seen_bytes(spec: ModelSpec, position: int) -> int:
    """The bytes that the token at `position` sees in all attention layers."""
    return sum(
        layer.nbytes * (position + 1 - layer.sight.first_visible(position))
        for layer in spec.layers
        if isinstance(layer, AttentionLayer)
    )


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _products_s(model: nn.Module, num_rows: int) -> float:
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    device = weights[0].device
    inputs = {width: _random(num_rows, width, like=weights[0]) for width in {weight.shape[1] for weight in weights}}

    def run() -> None:
        for weight in weights:
            nn.functional.linear(inputs[weight.shape[1]], weight)

    return seconds_of(captured(run, device), device)


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same work as one CUDA graph; on a CPU, `run` itself."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], object] = graph.replay
    return replay


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call, after some that do not count."""
    times = [_timed(run, device) for _ in range(REPEATS + 2)]
    return statistics.median(times[2:])


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / CALLS / 1e3


def kernel_shares(device: torch.device, speeds: Bandwidths) -> dict[str, Any]:
    """The decoding kernels at 64 requests: milliseconds, and the share of a copy's bandwidth that they reach."""
    if device.type != "cuda":
        return {"skipped": "kernels are measured on a GPU"}
    found: dict[str, Any] = {}
    for name, prepare in {"attend": _attend, "gated_delta": _gated_delta}.items():
        try:
            run, nbytes = prepare(device)
            seconds = seconds_of(captured(run, device), device)
        except (ImportError, torch.OutOfMemoryError, HybridKVError) as error:
            found[name] = {"skipped": f"{type(error).__name__}: {error}"}
            continue
        share = nbytes / seconds / speeds.copy
        found[name] = {"ms": round(1e3 * seconds, 4), "bytes": nbytes, "share_of_copy": round(share, 3)}
    return found


def _attend(device: torch.device) -> tuple[Callable[[], object], int]:
    """Attention of 64 requests over 8,192 tokens each: 16 heads on 4 of 256. Pages lie in random order."""
    attend = import_module("hybridkv.kernels.decode.attention").attend
    batch, length, heads, dim, block_tokens = 64, 8192, 4, 256, 16
    width = length // block_tokens
    num_pages = batch * width
    pages = torch.randperm(num_pages, device=device).to(torch.int32)
    table = DecodeTokens(
        positions=torch.full((batch,), length - 1, dtype=torch.int32, device=device),
        pages=pages,
        shape=torch.tensor([width, 0], dtype=torch.int32, device=device),
        block_tokens=block_tokens,
        sight=EVERYTHING,
    )
    keys, values = (_random(num_pages, block_tokens, heads, dim, device=device) for _ in range(2))
    query = _random(batch, 16, dim, device=device)
    nbytes = 2 * keys.numel() * keys.element_size()
    return lambda: attend(query, keys, values, table, scale=dim**-0.5), nbytes


def _gated_delta(device: torch.device) -> tuple[Callable[[], object], int]:
    """One token of 64 requests, 32 heads with float32 states of 128 x 128: read once and written once."""
    gated_delta = import_module("hybridkv.kernels.decode.delta").gated_delta
    batch, heads, dim = 64, 32, 128
    numbers = torch.randperm(batch, device=device).to(torch.int32) + 1
    table = DecodeStates(src=numbers, dst=numbers)
    states = torch.zeros(batch + 1, heads, dim, dim, dtype=torch.float32, device=device)
    q, k, v = (_random(batch, heads, dim, device=device) for _ in range(3))
    decay = -torch.rand(batch, heads, device=device)
    beta = torch.rand(batch, heads, device=device).to(torch.bfloat16)
    nbytes = 2 * batch * heads * dim * dim * states.element_size()
    return lambda: gated_delta(q, k, v, decay, beta, states, table, l2norm=True), nbytes


def _random(*shape: int, like: Tensor | None = None, device: torch.device | None = None) -> Tensor:
    where, dtype = (device, torch.bfloat16) if like is None else (like.device, like.dtype)
    return torch.randn(*shape, device=where, dtype=dtype)
