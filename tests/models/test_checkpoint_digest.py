"""Digests of checkpoints: equal for equal weights and configuration, and for nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybridkv.errors import ConfigError
from hybridkv.models.checkpoint_digest import NOT_THE_MODEL, checkpoint_digest, directory_digest

CONFIG = {"model_type": "llama", "hidden_size": 8, "rope_scaling": {"factor": 2.0}}
WEIGHTS = {
    "embed": torch.arange(24, dtype=torch.float32).reshape(3, 8).to(torch.bfloat16),
    "layers.0.up": torch.ones(4, 2),
    "layers.1.up": torch.zeros(4, 2),
    "scale": torch.tensor(1.5),
}


def saved(
    directory: Path, *shards: Mapping[str, torch.Tensor], config: Mapping[str, Any] = CONFIG, **metadata: str
) -> Path:
    """A checkpoint with one file for each shard."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    for number, shard in enumerate(shards or (WEIGHTS,)):
        save_file(dict(shard), directory / f"model-{number}.safetensors", metadata or None)
    return directory


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return saved(tmp_path / "plain")


def digest(directory: Path) -> str:
    return checkpoint_digest(directory, "bfloat16")


def test_names_and_shards_have_no_effect(plain: Path, tmp_path: Path) -> None:
    names = list(WEIGHTS)
    cuts = [[names], [names[:1], names[1:]], [names[2:], names[:2]], [[name] for name in reversed(names)]]
    for number, cut in enumerate(cuts):
        shards = [{name: WEIGHTS[name] for name in shard} for shard in cut]
        assert digest(saved(tmp_path / f"cut{number}", *shards)) == digest(plain)


def test_other_files_and_metadata_have_no_effect(plain: Path, tmp_path: Path) -> None:
    assert digest(saved(tmp_path / "other", format="pt")) == digest(plain)
    expected = digest(plain)
    (plain / "README.md").write_text("a model")
    (plain / "model.safetensors.index.json").write_text("{}")
    assert digest(plain) == expected


def test_fields_that_are_not_the_model_have_no_effect(plain: Path, tmp_path: Path) -> None:
    config = {**dict.fromkeys(NOT_THE_MODEL, "other"), **dict(reversed(CONFIG.items()))}
    assert digest(saved(tmp_path / "other", config=config)) == digest(plain)


def test_each_byte_of_each_weight_matters(plain: Path) -> None:
    file = plain / "model-0.safetensors"
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert len(data) - start == sum(weight.nbytes for weight in WEIGHTS.values())
    found = {digest(plain)}
    for place in range(start, len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        found.add(digest(plain))
    assert len(found) == 1 + len(data) - start


@pytest.mark.parametrize("change", [
    {"embed": WEIGHTS["embed"].reshape(8, 3)},
    {"embed": WEIGHTS["embed"].view(torch.float16)},
    {"layers.0.up": WEIGHTS["layers.1.up"], "layers.1.up": WEIGHTS["layers.0.up"]},
    {"more": torch.zeros(0)},
], ids=["shape", "dtype", "swapped", "one more"])  # fmt: skip
def test_shapes_types_and_names_of_weights_matter(change: dict[str, torch.Tensor], plain: Path, tmp_path: Path) -> None:
    assert digest(saved(tmp_path / "other", {**WEIGHTS, **change})) != digest(plain)


def test_a_missing_weight_matters(plain: Path, tmp_path: Path) -> None:
    fewer = {name: weight for name, weight in WEIGHTS.items() if name != "scale"}
    assert digest(saved(tmp_path / "fewer", fewer)) != digest(plain)


@pytest.mark.parametrize(
    "change", [{"hidden_size": 16}, {"rope_scaling": {"factor": 4.0}}, {"rope_theta": 1e6}], ids=str
)
def test_the_config_matters(change: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    assert digest(saved(tmp_path / "other", config={**CONFIG, **change})) != digest(plain)


def test_how_weights_are_computed_with_matters(plain: Path) -> None:
    given = [(), ("bfloat16",), ("float16",), ("bfloat16", "quantization fp8")]
    assert len({checkpoint_digest(plain, *computed) for computed in given}) == len(given)


# Weights in other files.


def test_pickled_weights(tmp_path: Path) -> None:
    directory = saved(tmp_path / "pickled")
    (directory / "model-0.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"some weights")
    first = digest(directory)
    (directory / "pytorch_model.bin").write_bytes(b"some weightz")
    assert digest(directory) != first
    (directory / "pytorch_model.bin").write_bytes(b"some weights")
    assert digest(directory.rename(tmp_path / "renamed")) == first


def test_directories_with_other_files(plain: Path) -> None:
    (plain / "adapter_config.json").write_text("{}")
    first, with_config = directory_digest(plain), directory_digest(plain, "adapter_config.json")
    (plain / "adapter_config.json").write_text("[]")
    assert directory_digest(plain) == first
    assert directory_digest(plain, "adapter_config.json") != with_config


# What cannot be read.


def test_no_weights(tmp_path: Path) -> None:
    directory = saved(tmp_path / "empty")
    (directory / "model-0.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"{directory} has no weights"):
        digest(directory)


@pytest.mark.parametrize("text", [None, "{", "[]", "3"], ids=str)
def test_no_config(text: str | None, plain: Path) -> None:
    (plain / "config.json").unlink()
    if text is not None:
        (plain / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=str(plain / "config.json")):
        digest(plain)


def damaged(data: bytes) -> dict[str, bytes]:
    """Files that are no longer what was written."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])

    def with_header(**changes: Any) -> bytes:
        raw = json.dumps({**header, **changes}).encode()
        return len(raw).to_bytes(8, "little") + raw + data[8 + size :]

    whole = len(data) - 8 - size
    return {
        "empty": b"",
        "shorter than a length": data[:5],
        "cut in its header": data[: 8 + size // 2],
        "cut in its data": data[:-1],
        "without data": data[: 8 + size],
        "with a huge header": b"\xff" * 8 + data[8:],
        "no JSON": data[:8] + b"x" * size + data[8 + size :],
        "a list": (2).to_bytes(8, "little") + b"[]" + data[8 + size :],
        "no offsets": with_header(scale={"dtype": "F32", "shape": []}),
        "offsets of text": with_header(scale={"dtype": "F32", "shape": [], "data_offsets": ["0", "4"]}),
        "one offset": with_header(scale={"dtype": "F32", "shape": [], "data_offsets": [0]}),
        "negative offsets": with_header(scale={"dtype": "F32", "shape": [], "data_offsets": [-9, -5]}),
        "offsets the wrong way round": with_header(scale={"dtype": "F32", "shape": [], "data_offsets": [4, 0]}),
        "offsets beyond the end": with_header(scale={"dtype": "F32", "shape": [], "data_offsets": [whole, whole + 4]}),
        "a tensor of text": with_header(scale="F32"),
    }


@pytest.mark.parametrize("trouble", damaged(bytes(8)[:0] + (2).to_bytes(8, "little") + b"{}"))
def test_damaged_files(trouble: str, plain: Path) -> None:
    file = plain / "model-0.safetensors"
    file.write_bytes(damaged(file.read_bytes())[trouble])
    with pytest.raises(ConfigError, match=str(file)):
        digest(plain)


def test_a_damaged_file_among_others(plain: Path) -> None:
    (plain / "model-1.safetensors").write_bytes((plain / "model-0.safetensors").read_bytes()[:-1])
    with pytest.raises(ConfigError, match=str(plain / "model-1.safetensors")):
        digest(plain)
