"""Kernels of decoding steps compile for a GPU where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 * 1024
"""What a program may have on an H100 or H200."""


def test_all_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """In a process of its own, since Triton is told at its import whether it interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    script = [sys.executable, str(ROOT / "tests/kernels/decode/compile_all.py")]
    told = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    for name in ("attend_kernel", "narrow_kernel", "gather_kernel", "bound_kernel", "race_kernel", "_advance_kernel"):
        assert name in told.stdout
    shared = [int(size) for size in re.findall(r"(\d+) bytes of shared memory", told.stdout)]
    assert max(shared) <= SHARED_BYTES
