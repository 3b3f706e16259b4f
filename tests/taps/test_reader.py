"""Samples that were written are read again, in any order, by any number of workers, and every byte is checked."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from hybridkv import taps
from hybridkv.errors import InputError
from hybridkv.taps.tensors import bytes_per_token
from tests.taps.samples import HIDDEN, LAYERS, fill, is_right, manifest, sample

SAMPLES = int(os.environ.get("HYBRIDKV_SAMPLES", "100"))


@pytest.mark.parametrize("shard_bytes", [None, 100_000], ids=["files", "shards"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
def test_random_samples_come_back_with_one_row_a_token(dtype: str, shard_bytes: int | None, tmp_path: Path) -> None:
    fill(tmp_path, SAMPLES, dtype=dtype, shard_bytes=shard_bytes)
    found = list(taps.open(tmp_path))
    assert sorted(one["index"] for one in found) == list(range(SAMPLES))
    for one in found:
        assert is_right(one, dtype)
        assert one["hidden_states"].shape == (len(one["token_ids"]), LAYERS, HIDDEN)
        assert one["hidden_states"].dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
        assert one["token_ids"].dtype == torch.int64


def test_a_file_is_what_trainers_expect(tmp_path: Path) -> None:
    """Their names, types and shapes; scales multiply without a change of shape."""
    fill(tmp_path / "plain", 3)
    plain = load_file(tmp_path / "plain/hidden_states/hs_2.safetensors")
    rows, token_ids = sample(2)
    assert set(plain) == {"hidden_states", "token_ids"}
    assert torch.equal(plain["hidden_states"], rows)
    assert torch.equal(plain["token_ids"], token_ids)
    fill(tmp_path / "fp8", 3, dtype="fp8")
    small = load_file(tmp_path / "fp8/hidden_states/hs_2.safetensors")
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in small.items()} == {
        "hidden_states": (torch.float8_e4m3fn, (len(rows), LAYERS, HIDDEN)),
        "hidden_states_scales": (torch.float32, (len(rows), LAYERS, 1)),
        "token_ids": (torch.int64, (len(rows),)),
    }
    restored = small["hidden_states"].to(torch.bfloat16) * small["hidden_states_scales"].to(torch.bfloat16)
    assert torch.allclose(restored.float(), rows.float(), rtol=0.1, atol=float(rows.abs().max()) / 448)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
def test_bytes_of_a_token(dtype: str, tmp_path: Path) -> None:
    fill(tmp_path, 1, dtype=dtype)
    tensors = load_file(tmp_path / "hidden_states/hs_0.safetensors")
    assert sum(one.nbytes for one in tensors.values()) == len(sample(0)[0]) * bytes_per_token(dtype, LAYERS, HIDDEN)


def test_the_order_is_drawn_from_the_seed_and_the_epoch(tmp_path: Path) -> None:
    fill(tmp_path, 30)

    def order(epoch: int = 0, **options: Any) -> list[int]:
        dataset = taps.open(tmp_path, **options)
        dataset.set_epoch(epoch)
        assert [one["index"] for one in dataset] == [dataset[i]["index"] for i in range(len(dataset))]
        return [one["index"] for one in dataset]

    assert order(shuffle=False) == order(5, shuffle=False) == list(range(30))
    orders = [order(), order(1), order(seed=1)]
    assert all(sorted(one) == list(range(30)) and one != list(range(30)) for one in orders)
    assert len({tuple(one) for one in orders}) == 3
    assert order() == orders[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shard_bytes", [None, 20_000], ids=["files", "shards"])
def test_a_data_loader_reads_each_sample_once(shard_bytes: int | None, workers: int, tmp_path: Path) -> None:
    fill(tmp_path, 20, shard_bytes=shard_bytes)
    dataset = taps.open(tmp_path, seed=3)
    mapped = list(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert [one["index"] for one in mapped] == [one["index"] for one in dataset]
    streamed = list(DataLoader(dataset.stream(), batch_size=None, num_workers=workers))
    assert sorted(one["index"] for one in streamed) == list(range(20))
    assert all(map(is_right, [*mapped, *streamed]))


def test_a_dtype_is_converted(tmp_path: Path) -> None:
    fill(tmp_path, 2, dtype="fp8")
    assert {one["hidden_states"].dtype for one in taps.open(tmp_path, dtype=torch.float16)} == {torch.float16}


# --- what is refused --------------------------------------------------------------------------------------------------


def test_folders_that_are_none(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing", Path(__file__)):
        with pytest.raises(InputError, match=f"{place.name} has no manifest.json: name a folder"):
            taps.open(place)


@pytest.mark.parametrize("part", ["hidden_states", "shards"])
def test_a_folder_that_cannot_be_listed(part: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest(1).as_json())
    (tmp_path / part).symlink_to(part)
    with pytest.raises(InputError, match=f"cannot read {tmp_path / part}: Too many levels of symbolic links; name"):
        taps.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "has format version 2: this hybridkv reads version 1"),
        ({"version": None}, "has format version None"),
        ({"format": "other"}, "is no manifest of hidden states"),
        ({"layers": "1,2"}, "layers is '1,2'; the manifest is damaged"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"dtype": "int4"}, "dtype 'int4' is none of bf16, fp32, fp8"),
    ],
)
def test_manifests_that_cannot_be_used_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    fill(tmp_path, 1)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=r"manifest\.json") as caught:
        taps.open(tmp_path)
    assert words in str(caught.value)
    path.write_bytes(b"{\xff")
    with pytest.raises(InputError, match=r"cannot read .*manifest.json"):
        taps.open(tmp_path)


def test_a_folder_that_is_not_complete(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    (tmp_path / "hidden_states/hs_2.safetensors").unlink()
    with pytest.raises(InputError, match="has 3 of 4 samples: run the same hybridkv extract again"):
        taps.open(tmp_path)
    dataset = taps.open(tmp_path, partial=True)
    assert sorted(one["index"] for one in dataset) == [0, 1, 3]
    with pytest.raises(InputError, match="sample 2: the folder has none"):
        dataset.read(2)


def test_samples_beyond_the_manifest_are_not_counted(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    (tmp_path / "manifest.json").write_text(manifest(2).as_json())
    assert [one["index"] for one in taps.open(tmp_path, shuffle=False)] == [0, 1]
    (tmp_path / "hidden_states/hs_1.safetensors").unlink()
    with pytest.raises(InputError, match="has 1 of 2 samples"):
        taps.open(tmp_path)


@pytest.mark.parametrize("shard_bytes", [None, 50_000], ids=["files", "shards"])
@settings(max_examples=60)
@given(data=st.data())
def test_any_flipped_bit_and_any_cut_is_noticed_or_harmless(shard_bytes: int | None, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fill(Path(directory), 2, shard_bytes=shard_bytes)
        [path, *_] = sorted(Path(directory).glob("*/*.safetensors"))
        raw = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            bit = data.draw(st.integers(0, len(raw) * 8 - 1))
            raw[bit // 8] ^= 1 << bit % 8
        else:
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        path.write_bytes(raw)
        with suppress(InputError):
            found = list(taps.open(directory))
            assert sorted(one["index"] for one in found) == [0, 1]
            assert all(map(is_right, found))


def test_a_file_under_anothers_name(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    files = tmp_path / "hidden_states"
    (files / "hs_1.safetensors").write_bytes((files / "hs_2.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"hs_1.safetensors has no sample 1"):
        list(taps.open(tmp_path))


def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    rows, token_ids = sample(0)
    path = tmp_path / "hidden_states/hs_0.safetensors"
    save_file({"hidden_states": rows, "token_ids": token_ids}, path)
    with pytest.raises(InputError, match=r"hs_0.safetensors has no checksums"):
        list(taps.open(tmp_path))


@pytest.mark.parametrize("change", [{"dtype": "fp32"}, {"dtype": "fp8"}, {"hidden_size": 41}, {"layers": [1, 2]}])
def test_samples_that_do_not_fit_the_manifest(change: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path, 1)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(manifest(1).as_json()), **change}))
    with pytest.raises(InputError, match=r"hs_0.safetensors: sample 0: .* instead of"):
        list(taps.open(tmp_path))
