"""Settings of this process: without them computing takes much longer, and long prompts cannot be loaded."""

from __future__ import annotations

import ctypes
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 1 << 30
_MMAP_BYTES = 32 << 20
"""The most that glibc accepts; larger tensors are mapped, and so are zero without being touched."""

_MANY_FILES = 1 << 16


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what tensors leave: memory fresh from the system faults on every page.

    Every step allocates the same tensors. By default their memory goes back to the system in between, and taking the
    page faults of a few MiB costs as much as a matrix product that fills them.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another libc, or a malloc of somebody's choice
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


def flush_denormals() -> None:
    """On this thread, and those that torch starts from it: numbers below 1e-38 count as zero.

    States that decay are full of them, and products of such numbers took a CPU twenty times as long.
    """
    torch.set_flush_denormal(True)


def plan_no_attention() -> None:
    """Keep cuDNN's attention out: it makes a plan for every new length of keys, and decoding has one in every step.

    On an H200 that was 60 ms of a step of 105 (16 layers, 16 requests). Torch's other kernels make none.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
