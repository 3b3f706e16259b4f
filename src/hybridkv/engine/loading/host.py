"""Process settings. Without them computing is much slower, and long prompts cannot be loaded."""

from __future__ import annotations

import ctypes
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 1 << 30
_MMAP_BYTES = 32 << 20
"""The maximum that glibc accepts. Larger tensors are mapped, so they are zero without being written."""

_MANY_FILES = 1 << 16


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory, to avoid page faults.

    Every step allocates the same tensors. By default their memory is returned to the system in between, and the page
    faults of a few MiB take as long as a matrix product that fills them.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another libc, or another malloc
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


def allow_many_files() -> None:
    """Raise this process's own limit of open files: a long prompt is loaded from hundreds of objects at once."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def has_bfloat16() -> bool:
    """Whether this CPU multiplies matrices of bfloat16 itself."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def flush_denormals() -> None:
    """Treat numbers below 1e-38 as zero, on this thread and on the threads that torch starts from it.

    Decaying states contain many denormals, and products with them took a CPU twenty times as long.
    """
    torch.set_flush_denormal(True)


def plan_no_attention() -> None:
    """Disable cuDNN's attention: it builds a plan for every new key length, so for every decode step.

    On an H200 that took 60 ms of a 105 ms step (16 layers, 16 requests). Torch's other kernels build no plans.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
