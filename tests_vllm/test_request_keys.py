"""Keys of vLLM's real requests: what changes the bytes of KV changes them, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from hybridkv.cache.tokens import lookup_key, pack_tokens
from hybridkv.integrations.vllm import request_keys
from hybridkv.integrations.vllm.request_keys import RequestTokens, is_keyed
from hybridkv.stream import BlockKeys

PROMPT = [(7 * number) % 1000 for number in range(300)]
ENDS = [16, 48, 64, 65, 96, 255, 256, 257, 300]
"""Ends of blocks, and positions inside them, beyond the first anchor."""


def new_request(prompt: list[int] | None = PROMPT, pooling: PoolingParams | None = None, **fields: Any) -> Request:
    sampling = None if pooling else SamplingParams(max_tokens=64)
    return Request("one", prompt, sampling, pooling, **fields)


def keys(ends: list[int] = ENDS, **fields: Any) -> dict[int, bytes]:
    return RequestTokens(new_request(**fields), 16).at(ends)


def image(identifier: str, offset: int = 64, length: int = 32) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


def same(one: dict[int, bytes], other: dict[int, bytes]) -> list[int]:
    """Positions with equal keys."""
    return [end for end in one if one[end] == other[end]]


def embedded(prompt: list[int], salt: str = "") -> dict[int, bytes]:
    """Those of an embedded engine."""
    return BlockKeys(lookup_key(salt).root, 16).at(ENDS, pack_tokens(prompt))


def test_plain_prompts_have_the_keys_of_an_embedded_engine() -> None:
    assert keys() == embedded(PROMPT)
    assert keys(cache_salt="tenant") == embedded(PROMPT, "tenant")
    assert len(set(keys().values())) == len(ENDS)


def test_replies_are_part_of_the_keys() -> None:
    """Tokens that were appended since the last call are taken, one or many at a time."""
    request = new_request(PROMPT[:250])
    tokens = RequestTokens(request, 16)
    assert tokens.at([48, 250])[48] == keys()[48]
    for token in PROMPT[250:]:
        request.append_output_token_ids(token)
        assert tokens.upto(request.num_tokens) == pack_tokens(PROMPT[: request.num_tokens])
    assert tokens.at(ENDS) == keys()


def test_another_token_changes_the_keys_from_its_place_on() -> None:
    other = [*PROMPT[:64], 999, *PROMPT[65:]]
    assert same(keys(), keys(prompt=other)) == [16, 48, 64]


def test_salts() -> None:
    assert not same(keys(), keys(cache_salt="a"))
    assert not same(keys(cache_salt="b"), keys(cache_salt="a"))
    assert keys(cache_salt="a") == keys(cache_salt="a")
    assert keys(cache_salt="") == keys(cache_salt=None) == keys()


# LoRA.


def adapter(directory: Path, weights: bytes, config: str = "{}") -> str:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(config)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


def lora(name: str, path: str, number: int = 1) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name, number, path)}


@pytest.fixture(autouse=True)
def _no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_keys, "_adapters", {})


def test_adapters(tmp_path: Path) -> None:
    first = adapter(tmp_path / "first", b"weights")
    copy = adapter(tmp_path / "copy", b"weights")
    retrained = adapter(tmp_path / "retrained", b"others!")
    rescaled = adapter(tmp_path / "rescaled", b"weights", '{"lora_alpha": 2}')
    plain = keys(**lora("sql", first))
    assert not same(plain, keys())
    assert plain == keys(**lora("sql", first, number=5)), "vLLM numbers adapters as it likes"
    assert plain == keys(**lora("sql", copy)), "the same files elsewhere"
    assert not same(plain, keys(**lora("chat", first)))
    assert not same(plain, keys(**lora("sql", retrained)))
    (tmp_path / "copy" / "adapter_model.safetensors").write_bytes(b"other weights")
    assert not same(plain, keys(**lora("sql", copy))), "replaced in its place"
    assert not same(plain, keys(**lora("sql", rescaled)))
    assert not same(plain, keys(cache_salt="tenant", **lora("sql", first)))


def test_adapters_of_the_hub() -> None:
    """They have a name and no directory here."""
    plain = keys(**lora("sql", "owner/adapter"))
    assert plain == keys(**lora("sql", "owner/adapter"))
    assert not same(plain, keys(**lora("sql", "owner/other")))


# Media.


def test_images_change_the_keys_from_their_place_on() -> None:
    """The tokens are the same: placeholders."""
    one, other = keys(mm_features=[image("a")]), keys(mm_features=[image("b")])
    assert same(one, other) == same(one, keys()) == [16, 48, 64]
    assert one == keys(mm_features=[image("a")])


def test_a_key_inside_an_image() -> None:
    """Already the first placeholder is of this image."""
    one, other = keys([64, 65, 80], mm_features=[image("a")]), keys([64, 65, 80], mm_features=[image("b")])
    assert same(one, other) == [64]


def test_images_in_another_order() -> None:
    """Two images at the same places."""
    there = [image("a", 32, 16), image("b", 100, 20)]
    swapped = [image("b", 32, 16), image("a", 100, 20)]
    assert same(keys(mm_features=there), keys(mm_features=swapped)) == [16]
    only_last = [image("a", 32, 16), image("c", 100, 20)]
    assert same(keys(mm_features=there), keys(mm_features=only_last)) == [16, 48, 64, 65, 96]


@pytest.mark.parametrize("steps", [[300], [70, 300], [63, 64, 65, 95, 96, 97, 300], list(range(1, 301))], ids=len)
def test_images_read_piece_by_piece(steps: list[int]) -> None:
    features = [image("a", 64, 32), image("b", 96, 9), image("c", 250, 50)]
    tokens = RequestTokens(new_request(mm_features=features), 16)
    for step in steps:
        assert len(tokens.upto(step)) == 4 * step
    assert tokens.at(ENDS) == keys(mm_features=features)


# What has no keys.


def test_keyed() -> None:
    assert is_keyed(new_request())
    assert is_keyed(new_request(cache_salt="a", mm_features=[image("a", 64, 8)]))


def test_a_small_image_is_not_keyed() -> None:
    """Its digest does not fit into its placeholders."""
    assert not is_keyed(new_request(mm_features=[image("a", 64, 7)]))
    assert not is_keyed(new_request(mm_features=[image("a", 64, 32), image("b", 100, 1)]))


def test_embeddings_are_not_keyed() -> None:
    assert not is_keyed(new_request(None, prompt_embeds=torch.zeros(300, 8)))
    is_token = [number % 2 == 0 for number in range(300)]
    assert not is_keyed(new_request(prompt_embeds=torch.zeros(300, 8), prompt_is_token_ids=is_token))


def test_sessions_and_pooling_are_not_keyed() -> None:
    assert not is_keyed(new_request(resumable=True))
    assert not is_keyed(new_request(pooling=PoolingParams()))
