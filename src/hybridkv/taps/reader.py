"""Reads a folder of hidden states for a trainer: in shuffled order, and every byte checked.

from torch.utils.data import DataLoader
dataset = hybridkv.taps.open("taps", shuffle=True, seed=0)
for sample in DataLoader(dataset, batch_size=None, num_workers=4):
    sample["hidden_states"], sample["token_ids"]
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hybridkv.errors import InputError
from hybridkv.taps.files import read_sample
from hybridkv.taps.folder import TapFolder
from hybridkv.taps.manifest import Manifest
from hybridkv.taps.tensors import HIDDEN_STATES, TOKEN_IDS, decode


def open(
    directory: str | Path,
    *,
    shuffle: bool = True,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    partial: bool = False,
) -> TapDataset:
    """Open a folder that `hybridkv extract` wrote.

    `shuffle`, `seed`: the order of the samples; `set_epoch` of the dataset changes it. `dtype`: of the hidden states;
    default: as they are stored, and bfloat16 for fp8. `partial`: open a folder that is not complete yet, too.
    Raises InputError if the folder cannot be read.
    """
    folder = TapFolder(directory)
    manifest = folder.manifest()
    if manifest is None:
        raise InputError(f"{directory} has no manifest.json: name a folder that hybridkv extract wrote")
    return TapDataset(folder, manifest, shuffle=shuffle, seed=seed, dtype=dtype, partial=partial)


class TapDataset(Dataset[dict[str, Any]]):  # type: ignore[misc]
    """The samples of a folder, for torch's DataLoader. Position i is the i-th sample of the epoch's order.

    A sample is a dictionary: `index` in the input, `token_ids [tokens]` and `hidden_states [tokens, layers, hidden]`.
    It is read when it is asked for, and checked: its checksum, one row a token, finite values.
    """

    def __init__(
        self,
        folder: TapFolder,
        manifest: Manifest,
        *,
        shuffle: bool,
        seed: int,
        dtype: torch.dtype | None = None,
        partial: bool = False,
    ) -> None:
        self.manifest = manifest
        self._places = folder.places()
        self._indices = sorted(index for index in self._places if index < manifest.num_samples)
        self._shuffle = shuffle
        self._seed = seed
        self._dtype = dtype
        if len(self._indices) < manifest.num_samples and not partial:
            raise InputError(
                f"{folder.directory} has {len(self._indices)} of {manifest.num_samples} samples: run the same "
                "hybridkv extract again to complete it, or open it with partial=True"
            )
        self._order = self._indices
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. Call it before you iterate; workers that persist keep their order."""
        self._order = list(self._indices)
        if self._shuffle:
            random.Random(f"{self._seed} {epoch}").shuffle(self._order)

    def stream(self) -> TapStream:
        """The same samples in the same order, as an iterable dataset: each worker of a DataLoader reads its share."""
        return TapStream(self)

    def read(self, index: int) -> dict[str, Any]:
        """The sample of this index in the input."""
        if index not in self._places:
            raise InputError(f"sample {index}: the folder has none of this index")
        path, is_shard = self._places[index]
        stored = read_sample(path, index, is_shard=is_shard)
        about = self.manifest
        try:
            rows, token_ids = decode(stored.tensors, about.dtype, len(about.layers), about.hidden_size)
        except InputError as error:
            raise InputError(f"{path}: sample {index}: {error}; remove the file and extract again") from None
        return {
            "index": index,
            TOKEN_IDS: token_ids,
            HIDDEN_STATES: rows if self._dtype is None else rows.to(self._dtype),
        }

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.read(self._order[position])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.read, self._order)


class TapStream(IterableDataset[dict[str, Any]]):  # type: ignore[misc]
    """The samples of a dataset, divided among the workers of a DataLoader."""

    def __init__(self, dataset: TapDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self._dataset[position] for position in range(first, len(self._dataset), step))
