"""The examples of docs/taps.md and docs/train_a_speculator.md run as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridkv.demo import demo_model
from hybridkv.models import load_model
from hybridkv.taps.tensors import bytes_per_token
from tests.taps.samples import fill

DOCS = Path(__file__).parents[2] / "docs"
SPECULATOR = DOCS / "train_a_speculator.md"


def run_example(page: Path) -> dict[str, object]:
    [example] = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(compile(example, str(page), "exec"), names)
    return names


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "taps", 3)
    monkeypatch.chdir(tmp_path)
    assert run_example(DOCS / "taps.md")["epoch"] == 1


def test_the_verifier_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "MODEL").symlink_to(demo_model())
    monkeypatch.chdir(tmp_path)
    run_example(SPECULATOR)
    own, copied = (load_file(folder / "model.safetensors") for folder in (demo_model(), tmp_path / "verifier"))
    assert sorted(copied) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    assert torch.equal(copied["model.norm.weight"], own["model.norm.weight"].float() + 1)
    assert torch.equal(copied["lm_head.weight"], own["lm_head.weight"])
    assert (tmp_path / "verifier" / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3-next-80b-a3b"])
def test_the_sizes_of_the_table(name: str) -> None:
    model = load_model(name)
    layers = [2, model.num_layers // 2, model.num_layers - 3, -1]
    sizes = [bytes_per_token(dtype, len(layers), model.hidden_size) for dtype in ("bf16", "fp8")]
    told = [f"{size:,}; {size * 50_000 * 2_048 / 2**40:.2f} TiB" for size in sizes]
    row = f"| {','.join(map(str, layers))} | {model.hidden_size:,} | {' | '.join(told)} |"
    assert row in SPECULATOR.read_text(encoding="utf-8")
