"""Writing samples: shards, resuming, full disks, killed processes, and two writers of one folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridkv import taps
from hybridkv.errors import DiskError, InputError
from hybridkv.taps import TapFolder, TapWriter
from hybridkv.taps.manifest import check_same
from tests.taps.processes import KILLS, PARTS
from tests.taps.samples import HIDDEN, LAYERS, fill, is_right, manifest, sample


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()} - {".lock", "manifest.json"}


def stamps(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.rglob("*.safetensors")}


@pytest.mark.parametrize("part", PARTS)
def test_a_killed_process_loses_no_sample(part: str, tmp_path: Path) -> None:
    """Each part says in tests/taps/processes.py what it does."""
    command, root = [sys.executable, "-m", "tests.taps.processes", part, str(tmp_path)], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300 + 5 * KILLS, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


def test_a_run_that_resumes_writes_only_what_is_missing(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    before = stamps(tmp_path)
    for index in (3, 7):
        (tmp_path / f"hidden_states/hs_{index}.safetensors").unlink()
    fill(tmp_path, 10)
    after = stamps(tmp_path)
    assert {name for name in before if after[name] != before[name]} == {"hs_3.safetensors", "hs_7.safetensors"}
    assert all(map(is_right, taps.open(tmp_path)))


def test_shards_are_of_about_the_size_asked_for(tmp_path: Path) -> None:
    fill(tmp_path, 60, shard_bytes=60_000)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "shards").iterdir())]
    assert len(sizes) > 3
    assert all(size < 75_000 for size in sizes)
    assert all(size > 30_000 for size in sizes[:-1])
    assert files(tmp_path) == {f"shard_{number:05}.safetensors" for number in range(len(sizes))}


def test_a_sample_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    fill(tmp_path, 5, shard_bytes=1)
    assert len(files(tmp_path)) == 5
    assert all(map(is_right, taps.open(tmp_path)))


def test_shards_may_be_asked_for_later(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    fill(tmp_path, 10, shard_bytes=1 << 20)
    assert files(tmp_path) == {"shard_00000.safetensors"}
    assert all(map(is_right, taps.open(tmp_path)))


def test_a_sample_that_was_packed_and_not_removed_is_there_once(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    own = (tmp_path / "hidden_states/hs_1.safetensors").read_bytes()
    fill(tmp_path, 4, shard_bytes=1 << 20)
    (tmp_path / "hidden_states/hs_1.safetensors").write_bytes(own)
    assert sorted(one["index"] for one in taps.open(tmp_path)) == [0, 1, 2, 3]
    fill(tmp_path, 4)
    assert files(tmp_path) == {"shard_00000.safetensors"}


def test_leftovers_and_files_cut_off_are_removed(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    folder = tmp_path / "hidden_states"
    (folder / ".hs_9.safetensors.partial").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    os.truncate(folder / "hs_2.safetensors", 400)
    (folder / "hs_3.safetensors").write_bytes(b"")
    fill(tmp_path, 4)
    assert files(tmp_path) == {f"hs_{index}.safetensors" for index in range(4)} | {"notes.txt"}
    assert all(map(is_right, taps.open(tmp_path)))


def test_a_damaged_sample_is_not_packed(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    path = tmp_path / "hidden_states/hs_1.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"hs_1.safetensors: sample 1 is not what was written"):
        fill(tmp_path, 2, shard_bytes=1 << 20)
    assert files(tmp_path) == {"hs_0.safetensors", "hs_1.safetensors"}


@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "rename"])
def test_a_full_disk_stops_the_run_and_leaves_no_half_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 3)
    before = stamps(tmp_path)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with TapFolder(tmp_path) as folder:
        with monkeypatch.context() as patch:
            writer = TapWriter(folder, manifest(6))
            patch.setattr(os, call, full)
            with pytest.raises(DiskError, match=r"cannot write .*hs_4.safetensors: No space left on device"):
                writer.submit(4, *sample(4)).result()
        writer.close()
    assert stamps(tmp_path) == before
    fill(tmp_path, 6)
    assert all(map(is_right, taps.open(tmp_path, partial=True)))


def test_a_disk_that_fills_up_within_a_shard_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 6)
    real = os.pwritev

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, [buffers[0][:5000]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", some)
        with pytest.raises(DiskError, match=r"shard_00000.safetensors: No space left"):
            fill(tmp_path, 6, shard_bytes=1 << 20)
    assert files(tmp_path) == {f"hs_{index}.safetensors" for index in range(6)}
    fill(tmp_path, 6, shard_bytes=1 << 20)
    assert files(tmp_path) == {"shard_00000.safetensors"}
    assert all(map(is_right, taps.open(tmp_path)))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (torch.zeros(4, LAYERS, HIDDEN), "hidden states [4, 3, 40] of 5 tokens: there must be one row a token"),
        (torch.zeros(5, HIDDEN), "[5, 40] of 5 tokens"),
        (torch.full((5, LAYERS, HIDDEN), float("nan")), "values that are not finite"),
        (torch.full((5, LAYERS, HIDDEN), float("inf")), "values that are not finite"),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_rows_that_are_no_sample_are_refused(rows: torch.Tensor, words: str, dtype: str, tmp_path: Path) -> None:
    with TapFolder(tmp_path) as folder, TapWriter(folder, manifest(1, dtype)) as writer:
        with pytest.raises(InputError) as caught:
            writer.submit(0, rows, torch.arange(5)).result()
        assert words in str(caught.value)
    assert files(tmp_path) == set()


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
def test_rows_of_zeros_and_of_the_largest_values(dtype: str, tmp_path: Path) -> None:
    rows = torch.zeros(3, LAYERS, HIDDEN)
    rows[1] = 3e38
    rows[2] = 1e-30
    with TapFolder(tmp_path) as folder, TapWriter(folder, manifest(1, dtype)) as writer:
        folder.write_manifest(manifest(1, dtype))
        writer.submit(0, rows, torch.arange(3)).result()
    [found] = taps.open(tmp_path)
    assert torch.allclose(found["hidden_states"].float(), rows, rtol=0.01, atol=1e-29)


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    with (
        TapFolder(tmp_path),
        pytest.raises(InputError, match="is being written by another process"),
        TapFolder(tmp_path),
    ):
        pass
    fill(tmp_path, 1)


def test_places_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"cannot make .*file"), TapFolder(tmp_path / "file"):
        pass


def test_what_a_folder_was_begun_with_is_compared(tmp_path: Path) -> None:
    found = manifest(3)
    check_same(tmp_path, found, {"model": "another name", "dtype": "bf16", "layers": (1, 2, "final")})
    for change, words in (
        ({"layers": (1, 2)}, "another value of --layers: 1,2,final instead of 1,2;"),
        ({"dtype": "fp8"}, "--dtype: bf16 instead of fp8"),
        ({"model_digest": "x"}, "the digest of the model: mmmm"),
        ({"input_digest": "x"}, "the digest of the input: iiii"),
        ({"max_tokens": 5}, "--max-tokens: none instead of 5"),
    ):
        with pytest.raises(InputError) as caught:
            check_same(tmp_path, found, change)
        assert words in str(caught.value)
        assert "ask for the same again, or name another --out" in str(caught.value)
