"""Random samples, equal in every process that makes the sample of an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridkv.taps import Manifest, TapFolder, TapWriter

LAYERS, HIDDEN = 3, 40


def manifest(num_samples: int, dtype: str = "bf16") -> Manifest:
    return Manifest(
        model="tiny",
        model_digest="m" * 32,
        input_digest="i" * 32,
        layers=(1, 2, "final"),
        dtype=dtype,
        hidden_size=HIDDEN,
        num_samples=num_samples,
        max_tokens=None,
    )


def sample(index: int) -> tuple[Tensor, Tensor]:
    """Rows and token ids, of a length that the index decides."""
    source = torch.Generator().manual_seed(index)
    length = int(torch.randint(1, 60, (1,), generator=source))
    rows = torch.randn(length, LAYERS, HIDDEN, generator=source).bfloat16()
    return rows * 10 ** (index % 5 - 2), torch.randint(0, 1000, (length,), generator=source)


def fill(directory: Path, num_samples: int, *, dtype: str = "bf16", shard_bytes: int | None = None) -> None:
    """Write all samples that are not there yet, as a run that resumes does."""
    about = manifest(num_samples, dtype)
    with TapFolder(directory) as folder:
        there = folder.recover()
        if folder.manifest() is None:
            folder.write_manifest(about)
        with TapWriter(folder, about, shard_bytes=shard_bytes) as writer:
            futures = [writer.submit(index, *sample(index)) for index in range(num_samples) if index not in there]
            for future in futures:
                future.result()


def is_right(found: dict[str, Any], dtype: str = "bf16") -> bool:
    """Whether a sample that was read is what was written, as exactly as its type allows."""
    rows, token_ids = sample(found["index"])
    if dtype == "fp8":  # three bits of mantissa, and the smallest values of a row lie on a grid
        scale = rows.float().abs().amax(-1, keepdim=True) / 448
        error = (found["hidden_states"].float() - rows.float()).abs()
        close = bool((error <= rows.float().abs() / 14 + scale / 256).all())
    else:
        close = torch.equal(found["hidden_states"].float(), rows.float())
    return close and torch.equal(found["token_ids"], token_ids)
