"""Writes the dataset that speculators expects beside hidden states, if `datasets` is installed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybridkv.cli.extract_input import import_datasets
from hybridkv.cli.extract_run import Ready
from hybridkv.errors import DiskError

_LAST = "state.json"
"""Without it a folder is no dataset: it is put in place last."""


def write_dataset(directory: Path, samples: Iterable[Ready]) -> str:
    """Write `input_ids`, `loss_mask` and `seq_len` of all samples. Returns a remark for the user if it cannot."""
    if (directory / _LAST).exists():
        return ""
    datasets = import_datasets()
    if datasets is None:
        return (
            "\nNo dataset is beside the hidden states: speculators needs one; pip install datasets, and run this again"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".dataset-", dir=directory) as draft:
            made = datasets.Dataset.from_generator(
                lambda: _rows(samples), features=_features(datasets), cache_dir=f"{draft}/cache", fingerprint="taps"
            )
            made.with_format("torch").save_to_disk(f"{draft}/dataset")
            names = sorted(os.listdir(f"{draft}/dataset"), key=lambda name: name == _LAST)
            for name in names:
                os.rename(f"{draft}/dataset/{name}", directory / name)
    except OSError as error:
        raise DiskError(f"cannot write the dataset in {directory}: {error.strerror or error}") from error
    return ""


def _rows(samples: Iterable[Ready]) -> Iterator[dict[str, Any]]:
    for one in samples:
        yield {"input_ids": one.prompt.token_ids, "loss_mask": one.loss_mask, "seq_len": one.prompt.num_tokens}


def _features(datasets: Any) -> Any:
    whole = datasets.Value("int64")
    return datasets.Features(
        {"input_ids": datasets.Sequence(whole), "loss_mask": datasets.Sequence(whole), "seq_len": whole}
    )
