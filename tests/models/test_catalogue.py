"""The catalogue against the transformers source, and against published figures."""

from __future__ import annotations

import pytest
import transformers

from hybridkv.models import catalogue, load_model, read_config
from hybridkv.spec import DType

VERIFIED = sorted(name for name, entry in catalogue().items() if entry.verified_by)


@pytest.mark.parametrize("name", VERIFIED)
def test_verified_entries_are_the_defaults_of_a_config_class(name: str) -> None:
    config = getattr(transformers, catalogue()[name].verified_by or "")()
    assert load_model(name).layers == read_config(config.to_dict(), name=name).layers
    assert load_model(name).verified


def test_all_others_say_that_they_are_unverified() -> None:
    others = [load_model(name) for name in catalogue() if name not in VERIFIED]
    assert others
    assert all(not spec.verified and "unverified" in spec.source for spec in others)


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_entries_are_read_without_leaning_on_defaults(name: str) -> None:
    """Sizes that differ between the members of a family are spelled out, so that a new default cannot change them."""
    config = catalogue()[name].config
    wanted = {"num_hidden_layers", "hidden_size", "dtype"}
    assert wanted <= set(config)
    assert name == name.lower()


@pytest.mark.parametrize(
    ("name", "kv_bytes", "fp32_mib", "bf16_mib"),
    [
        ("qwen3-next-80b-a3b", 24_576, 73.7, 37.7),
        ("qwen3.5-397b-a17b", 30_720, 183.2, 93.2),
        ("qwen3.5-35b-a3b", 20_480, 61.4, 31.4),
        ("qwen3.6-27b", 65_536, 146.8, 74.8),
        ("qwen3.5-4b", 32_768, 49.1, 25.1),
        ("qwen3.5-0.8b", 12_288, 18.6, 9.6),
        ("nemotron-h-8b", 16_384, 97.4, 49.4),
        ("nemotron-3-nano-30b-a3b", 6_144, 46.8, 23.8),
        ("granite-4.0-h-small", 16_384, None, None),
        ("jamba-1.5-mini", 16_384, None, None),
        ("falcon-h1-34b", 147_456, None, None),
        ("lfm2-8b-a1b", 12_288, None, None),
        ("kimi-linear-48b-a3b", 8_064, None, None),
        ("gpt-oss-120b", 36_864, 0.0, 0.0),
        ("gemma-3-27b", 81_920, 0.0, 0.0),
    ],
)
def test_published_sizes(name: str, kv_bytes: int, fp32_mib: float | None, bf16_mib: float | None) -> None:
    spec = load_model(name, state_dtype=DType.FLOAT32)
    assert spec.kv_bytes_per_token == kv_bytes
    for dtype, mib in ((DType.FLOAT32, fp32_mib), (DType.BFLOAT16, bf16_mib)):
        if mib is not None:
            assert round(load_model(name, state_dtype=dtype).state_bytes / 2**20, 1) == mib


@pytest.mark.parametrize(("name", "mib"), [("gpt-oss-120b", 4.5), ("gemma-3-27b", 416)])
def test_published_window_sizes(name: str, mib: float) -> None:
    assert load_model(name).checkpoint_bytes(16) == mib * 2**20
