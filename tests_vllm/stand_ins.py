"""Stand-ins for operations of vLLM that need bfloat16 instructions, for ARM CPUs that have none.

vLLM's build for ARM compiles its operations on bfloat16 with these instructions, and has no other code for them: on
other CPUs a process that calls one ends with SIGILL. `install` lets a process of its own call such an operation. Only
if that ends so, the operations that the tests' models need are replaced by torch's, in float32. Caches and states keep
the layouts of vLLM, which still writes K and V itself, and float32 models run as before.

vLLM spawns the workers of a server and of several ranks. It calls `install` there itself, as a plugin: see
`stand_ins-1.dist-info`.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import resource
import signal
from typing import Any

import torch
from reference_ops import attention, delta_rule, delta_rule_example, gated_delta_rule
from torch.nn.functional import linear


def install() -> None:
    """Replace the operations if they cannot run here. It forks: call it before this process uses OpenMP."""
    if not is_needed():
        return
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    ops.chunk_gated_delta_rule_cpu = delta_rule
    ops.fused_sigmoid_gating_delta_rule_update_cpu = gated_delta_rule
    ops.cpu_attention_with_kv_cache = _for_bfloat16(attention, ops.cpu_attention_with_kv_cache)
    ops.rotary_embedding = _for_bfloat16(_rotate_wide(ops.rotary_embedding), ops.rotary_embedding, index=1)
    cpu_moe.cpu_fused_moe = _for_bfloat16(_experts_wide(cpu_moe.cpu_fused_moe), cpu_moe.cpu_fused_moe)
    cpu_moe.cpu_prepack_moe_weight = _for_bfloat16(
        _pack_wide(cpu_moe.cpu_prepack_moe_weight), cpu_moe.cpu_prepack_moe_weight
    )
    own = CpuCommunicator.all_reduce
    CpuCommunicator.all_reduce = _for_bfloat16(_reduce_wide(own), own, index=1)
    own = layers.dispatch_cpu_unquantized_gemm
    layers.dispatch_cpu_unquantized_gemm = _dispatch_wide(own)


def is_needed() -> bool:
    """Whether a process that calls an operation on bfloat16 ends with SIGILL. The same flags compile all of them."""
    if platform.machine() != "aarch64":
        return False  # On x86, AMX raises SIGILL, too, until the process has asked for it.
    import vllm._custom_ops as ops

    if ops.chunk_gated_delta_rule_cpu is delta_rule:
        return False  # They are installed. A fork of a process that has used OpenMP would hang.
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            ops.chunk_gated_delta_rule_cpu(**delta_rule_example(torch.bfloat16))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL


# --- what vLLM computes itself, in float32 ----------------------------------------------------------------------------


def _for_bfloat16(stand_in: Any, own: Any, index: int = 0) -> Any:
    """Calls one or the other. `index`: the tensor among the arguments whose dtype counts."""

    def called(*args: Any, **options: Any) -> Any:
        dtype = [*args, *options.values()][index].dtype
        return (stand_in if dtype == torch.bfloat16 else own)(*args, **options)

    return called


def _rotate_wide(own: Any) -> Any:
    def rotate(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, size: int, cache: torch.Tensor, *rest: Any
    ) -> None:
        wide_query, wide_key = query.float(), key.float()
        own(positions, wide_query, wide_key, size, cache.float(), *rest)
        query.copy_(wide_query)
        key.copy_(wide_key)

    return rotate


def _reduce_wide(own: Any) -> Any:
    def reduce(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.copy_(own(self, rows.float()))

    return reduce


def _pack_wide(own: Any) -> Any:
    return lambda weight, isa: own(weight.float(), "vec")


def _experts_wide(own: Any) -> Any:
    def experts(out: torch.Tensor, rows: torch.Tensor, *args: Any) -> None:
        *rest, _isa, skip_weighted = args
        wide = out.float()
        own(wide, rows.float(), *rest, "vec", skip_weighted)
        out.copy_(wide)

    return experts


def _dispatch_wide(own: Any) -> Any:
    """torch multiplies bfloat16 matrices on such a CPU, but takes a hundred times as long."""

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.dtype != torch.bfloat16 or layer.weight.ndim != 2:
            return own(layer, remove_weight)
        wide = layer.weight.detach().float()

        def multiply(rows: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return linear(rows.float(), wide, None if bias is None else bias.float()).to(rows.dtype)

        layer.cpu_linear = multiply
        return None

    return dispatch
