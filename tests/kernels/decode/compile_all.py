"""Compiles all kernels of decoding steps for a Hopper GPU, on a machine without one. Run as a script: it replaces the
driver of Triton. Its interpreter accepts code that its compiler refuses.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hybridkv.engine.sampling.device_draw import PlainParams, draw_plain
from hybridkv.kernels.decode import attention, conv, delta, latent, lightning, mamba
from hybridkv.kernels.decode.advance import advance
from hybridkv.kernels.decode.tables import DecodeStates, DecodeTokens, StepNumbers
from hybridkv.sight import Sight

ROWS = 4
BF16 = torch.bfloat16


class NoDriver:
    """Stands for the driver of a GPU: it says which one, and runs nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(launch: Any) -> Any:
    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        sys.stdout.write(f"{self.__name__}: {compiled.metadata.shared} bytes of shared memory\n")
        return compiled

    return run


def compile_attention() -> None:
    ints = torch.zeros(ROWS, dtype=torch.int32)
    pages = torch.zeros(ROWS * 64, dtype=torch.int32)
    for sight in (Sight(), Sight(window=100), Sight(chunk=64)):
        table = DecodeTokens(ints, pages, torch.zeros(2, dtype=torch.int32), 16, sight)
        cache = torch.zeros(8, 16, 4, 128, dtype=BF16)
        attention.attend(torch.zeros(ROWS, 16, 128, dtype=BF16), cache, cache, table, scale=1.0)
    sinks = torch.zeros(16, dtype=BF16)
    attention.attend(torch.zeros(ROWS, 16, 128, dtype=BF16), cache, cache, table, scale=1.0, sinks=sinks, softcap=9.0)
    for dim, value_dim in ((192, 128), (512, 512)):
        for heads, dtype in ((16, BF16), (4 * 64, BF16), (16, torch.float32)):
            keys, values = (torch.zeros(8, 16, 4, size, dtype=dtype) for size in (dim, value_dim))
            attention.attend(torch.zeros(ROWS, heads, dim, dtype=dtype), keys, values, table, scale=1.0)
    attention.write_tokens(cache, cache, table, cache[:ROWS, 0], cache[:ROWS, 0])
    latents, rotary = torch.zeros(8, 16, 1, 512, dtype=BF16), torch.zeros(8, 16, 1, 64, dtype=BF16)
    expand = torch.zeros(16 * 256, 512, dtype=BF16)
    latent.attend_latents(torch.zeros(ROWS, 16, 192, dtype=BF16), latents, rotary, table, expand, scale=1.0)


def compile_states() -> None:
    ints = torch.zeros(ROWS, dtype=torch.int32)
    table = DecodeStates(ints, ints)
    heads = torch.zeros(ROWS, 8, 128, dtype=BF16)
    each, states = torch.zeros(ROWS, 8), torch.zeros(5, 8, 128, 128)
    delta.gated_delta(heads[:, :4], heads[:, :4], heads, each, each, states, table, l2norm=True)
    delta.kimi_delta(heads, heads, heads, heads.float(), each, states, table, l2norm=True)
    lightning.lightning(heads, heads, heads, torch.zeros(8), states, table)
    x, taps = torch.zeros(ROWS, 1024, dtype=BF16), torch.zeros(1024, 4, dtype=BF16)
    conv.conv(x, taps, taps[:, 0], "silu", torch.zeros(5, 1024, 3, dtype=BF16), table)
    b = torch.zeros(ROWS, 2, 128, dtype=BF16)
    mamba.mamba2(
        heads[..., :64], heads[..., 0], torch.zeros(8), b, b, states[:, :, :64], table, d=each[0], dt_bias=each[0]
    )
    wide = torch.zeros(1024)
    mamba.mamba1(
        x, x, torch.zeros(1024, 16), x[:, :16], x[:, :16], torch.zeros(5, 1024, 16), table, d=wide, z=x, dt_bias=wide
    )


def compile_draws() -> None:
    ones, ints = torch.ones(ROWS), torch.zeros(ROWS, dtype=torch.int32)
    params = PlainParams(ones, ints, ones, torch.zeros(ROWS, dtype=torch.int64))
    for dtype in (BF16, torch.float32):
        draw_plain(torch.zeros(ROWS, 151_936, dtype=dtype), params, filtered=True, drawn=True)


def compile_advance() -> None:
    longs, ints = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int32)
    pages, ends = torch.zeros(2, ROWS, dtype=torch.int32), torch.zeros(ROWS, 8, dtype=torch.int32)
    advance(StepNumbers(longs, longs, longs, longs, longs, ints, ints, ends, pages, pages), longs)


if __name__ == "__main__":
    driver.set_active(NoDriver())
    JITFunction.run = compile_only(JITFunction.run)
    compile_advance()
    compile_draws()
    compile_states()
    compile_attention()
